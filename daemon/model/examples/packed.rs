//! How fast matrices of AWQ and GPTQ checkpoints become rows of `Q4_1`: one layer in the shape of Llama 3 8B, out of the page cache, in the
//! portions in which a worker reads.

use std::time::Instant;

use pagedd_core::TensorType;
use pagedd_model::testing::{PackedAs, PackedFormat, TinyModel, write_packed_directory};
use pagedd_model::{ModelError, ModelSource};

/// Bytes that a worker reads at a time.
const PORTION: usize = 1 << 20;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let model = TinyModel {
        layers: 1,
        hidden: 4096,
        feed_forward: 14_336,
        heads: 32,
        kv_heads: 8,
        head_dim: 128,
        ty: TensorType::F16,
        ..TinyModel::default()
    };
    for (format, group) in [
        (PackedFormat::Awq, Some(128)),
        (PackedFormat::Gptq, Some(128)),
        (PackedFormat::Awq, Some(32)),
        (PackedFormat::Gptq, Some(32)),
    ] {
        let directory = tempfile::tempdir()?;
        write_packed_directory(directory.path(), 1, &model, &PackedAs::usual(format, group))?;
        let begun = Instant::now();
        let source = ModelSource::open(directory.path())?;
        println!("{format:?}, groups of {group:?}: opened in {:.1} ms", begun.elapsed().as_secs_f64() * 1e3);
        let (mut bytes, mut seconds) = (0, 0.0);
        for tensor in source.tensors().filter(|tensor| tensor.ty == TensorType::Q4_1) {
            let mut best = f64::MAX;
            for _ in 0..3 {
                let begun = Instant::now();
                read(&source, tensor)?;
                best = best.min(begun.elapsed().as_secs_f64());
            }
            println!(
                "  {:40} {:6.1} MB in {:6.1} ms, {:6.0} MB/s",
                tensor.name,
                tensor.bytes as f64 / 1e6,
                best * 1e3,
                tensor.bytes as f64 / best / 1e6
            );
            (bytes, seconds) = (bytes + tensor.bytes, seconds + best);
        }
        println!("  all: {:.0} MB/s on one thread", bytes as f64 / seconds / 1e6);
    }
    Ok(())
}

fn read(source: &ModelSource, tensor: &pagedd_model::TensorInfo) -> Result<(), ModelError> {
    let step = (PORTION / tensor.row_bytes()).max(1).next_multiple_of(16);
    let mut portion = Vec::new();
    for first in (0..tensor.rows).step_by(step) {
        let rows = first..tensor.rows.min(first + step);
        portion.resize(rows.len() * tensor.row_bytes(), 0);
        source.read_rows(tensor, rows, &mut portion)?;
    }
    Ok(())
}
