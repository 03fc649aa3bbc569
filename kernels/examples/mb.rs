//! Short timings of one product in cache: thread CPU is shared, so the least of many short runs counts.
use pagedd_core::TensorType;
use pagedd_kernels::*;
use std::time::Instant;
fn main() {
    let isas: Vec<Isa> = Isa::ALL.into_iter().filter(|i| *i != Isa::Portable && i.usable() == *i).collect();
    let arg: Vec<String> = std::env::args().collect();
    let only = arg.get(1).cloned().unwrap_or_default();
    let tys: Vec<TensorType> =
        [TensorType::Q4_1, TensorType::Q8_0, TensorType::Q5_1, TensorType::Q6_K, TensorType::F16]
            .into_iter()
            .filter(|t| arg.get(2).is_none_or(|a| a.split(',').any(|a| a == format!("{t}"))))
            .collect();
    let rows: Vec<usize> = arg.get(3).map_or(vec![1, 2, 3, 4, 5, 6, 8, 16, 17, 32, 128], |a| {
        a.split(',').map(|x| x.parse().unwrap()).collect()
    });
    let limit: f64 = arg.get(4).map_or(0.04, |x| x.parse().unwrap());
    let pool = ThreadPool::new(1, None).unwrap();
    for ty in tys {
        for (n, k) in [(512, 512), (256, 1536)] {
            let p = PackedType::for_source(ty, false);
            let layout = MatrixLayout::new(p, n, k).unwrap();
            let src: Vec<u8> =
                (0..n * k / ty.block_elements() * ty.block_bytes()).map(|i| (i * 7 % 60) as u8).collect();
            let mut bytes = vec![0; layout.bytes() + 64];
            let at = bytes.as_ptr().align_offset(64);
            let end = at + layout.bytes();
            pack(&layout, ty, &src, 0, &mut bytes[at..end]).unwrap();
            for isa in &isas {
                if !only.is_empty() && only != "all" && only != isa.as_str() {
                    continue;
                }
                print!("{:6} {n:4}x{k:4} {:12}", format!("{ty}"), isa.as_str());
                for &r in &rows {
                    let x: Vec<f32> = (0..r * k).map(|i| (i % 97) as f32 / 50.0 - 1.0).collect();
                    let mut a = Activations::new();
                    a.set(&pool, *isa, &x, k, p.activations()).unwrap();
                    let mut out = vec![0.0; r * n];
                    let mut best = f64::INFINITY;
                    let mut spent = 0.0;
                    while spent < limit {
                        let t = Instant::now();
                        matmul(&pool, *isa, &Matrix::new(layout, &bytes[at..end]).unwrap(), &a, &mut out, n)
                            .unwrap();
                        let s = t.elapsed().as_secs_f64();
                        spent += s;
                        best = best.min(s);
                    }
                    print!(" {r}:{:.1}", (r * n * k) as f64 / best / 1e9);
                }
                println!();
            }
        }
    }
}
