//! scratch
use pagedd_wire::PROTOCOL;
use pagedd_wire::worker::*;
use pagedd_worker::{Fds, ModelRunner};
use std::time::Instant;
fn main() -> anyhow::Result<()> {
    let args: Vec<String> = std::env::args().collect();
    let path = args[1].clone();
    let budget: u32 = args[2].parse()?;
    let start = Instant::now();
    let hello = Hello { protocol: PROTOCOL, path, device: Device::Cuda { ordinal: 0 }, dtype: Dtype::Auto, kv_dtype: KvDtype::Bf16, block_size: 16,
        kv_memory: KvMemory::Auto, max_model_len: Some(std::env::var("LEN").map_or(131072, |x| x.parse().unwrap())), max_num_seqs: 256, max_num_batched_tokens: budget, threads: Some(16), deterministic: false,
        measure: false, weights_fd: false, kv_fd: false, weights_bytes: 0, kv_bytes: 0, known_cost: None, algorithms: Vec::new() };
    let mut runner = ModelRunner::load(&hello, Fds::default(), &mut |_| true)?;
    println!("loaded in {:?}, {} blocks", start.elapsed(), runner.info().blocks);
    let greedy = pagedd_core::SamplingParams::GREEDY;
    let mut id = 0;
    for case in &args[3..] {
        let (kind, rest) = case.split_once(':').unwrap();
        let n: Vec<u32> = rest.split('x').map(|x| x.parse().unwrap()).collect();
        let (rows, context) = (n[0], n[1]);
        let steps = 40_u32;
        let per = (context + steps + 1).div_ceil(16);
        let blocks = runner.info().blocks;
        let seqs: Vec<u64> = (0..rows as u64).map(|i| 1_000_000 + id * 1000 + i).collect();
        let mut times = Vec::new();
        let mut lens = Vec::new();
        for step in 0..steps {
            id += 1;
            let begin = if step == 0 { seqs.iter().map(|&seq| Begin { seq, choice: 0, sampling: greedy.into(), prompt: 0, tokens: vec![] }).collect() } else { vec![] };
            let rows: Vec<Row> = seqs.iter().enumerate().map(|(i, &seq)| Row {
                seq, start: if kind == "p" { 0 } else { context + step },
                inputs: if kind == "p" { (0..context).map(|t| Input::Known((t * 7 + step) % 30000)).collect() } else { vec![Input::Known((i as u32 * 37 + step) % 30000)] },
                table: TableUpdate { from: 0, blocks: if step == 0 { (0..per).map(|b| (i as u32 * per + b) * 7919 % blocks).collect() } else { vec![] } },
                samples: vec![seq], drafts: 0 }).map(|mut r| { if step > 0 { r.table.from = per; } r }).collect();
            let plan = Plan { id, begin, copies: vec![], rows, end: vec![] };
            let start = Instant::now();
            let out = runner.run(&plan).map_err(|e| anyhow::anyhow!("{e}"))?;
            times.push(start.elapsed().as_micros());
            lens.push(out.sampled.len());
            if kind == "p" && step > 6 { break; }
        }
        let first: Vec<_> = times.iter().take(3).copied().collect();
        let mut rest = times[2.min(times.len() - 1)..].to_vec();
        rest.sort();
        println!("{case}: median {} µs, least {}, most {}, first {first:?}, drawn {}", rest[rest.len() / 2], rest[0], rest[rest.len() - 1], lens.last().unwrap());
    }
    Ok(())
}
