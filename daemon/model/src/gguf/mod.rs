//! GGUF, versions 2 and 3, little-endian, as specified by the ggml project.

mod header;
mod model;
mod text;

pub(crate) use header::Metadata;

/// An opened GGUF file's metadata: small values inline, long ones by their place in the file.
#[derive(Debug)]
pub(crate) struct Gguf {
    metadata: Metadata,
}

#[cfg(test)]
mod tests;
