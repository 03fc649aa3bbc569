//! Writes the generated model of tests that need speed, two layers as a GGUF file, and prints its path.

use std::io;
use std::path::PathBuf;

use pagedd_model::testing::{TinyModel, write_gguf};

fn main() -> io::Result<()> {
    let mut args = std::env::args_os().skip(1);
    let (Some(path), None) = (args.next(), args.next()) else {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "usage: tiny_model FILE"));
    };
    let path = PathBuf::from(path);
    write_gguf(&path, 41, &TinyModel { context: 16_384, ..TinyModel::default() })?;
    println!("{}", path.display());
    Ok(())
}
