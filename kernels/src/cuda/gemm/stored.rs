//! Kept algorithms as bytes, so that a file can hold them.
//!
//! **Owns** the form of the bytes, and for which library and GPU they hold. **Never** opens the file.
//!
//! All numbers are little-endian: magic, version, library, multiprocessors, length and text of the GPU's name, number of entries, entries, and
//! FNV-1a of all bytes before. An entry is shape, bucket, CUDA's numbers of both types, and the 64 bytes that cuBLASLt keeps an algorithm in.

use std::fmt;

use cudarc::cublaslt::sys::cudaDataType;

use super::{Algorithm, CudaError, GemmShape, Key, Types, bucket};

const MAGIC: [u8; 8] = *b"pagedgmm";
const VERSION: u32 = 2;
/// Bytes of an entry.
const ENTRY: usize = 3 * 8 + 2 * 4 + 8 * 8;

/// Algorithms for products, as [`Gemm::algorithms`](super::Gemm::algorithms) gives them.
///
/// Having one tells you: each entry has a shape and types that products have. It does not tell you that they hold for this library and GPU:
/// [`Gemm::restore`](super::Gemm::restore) does.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Algorithms {
    place: Place,
    kept: Vec<Kept>,
}

/// One algorithm and what it is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Kept {
    pub(super) key: Key,
    pub(super) algorithm: Algorithm,
}

/// Where algorithms hold.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Place {
    /// Version of cuBLASLt.
    pub(super) library: u64,
    /// The GPU's name.
    pub(super) gpu: String,
    /// How many it has: a part of a GPU has the whole one's name.
    pub(super) multiprocessors: u32,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { library, gpu, multiprocessors } = self;
        write!(f, "cuBLASLt {library} on {gpu:?} of {multiprocessors} multiprocessors")
    }
}

/// Why stored algorithms are of no use: products choose anew.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum AlgorithmsError {
    /// The bytes are not those of a list, or no longer.
    #[error("the kept algorithms are damaged: {problem}")]
    Damaged {
        /// What is wrong with them.
        problem: &'static str,
    },
    /// They were kept with another library, or on another GPU.
    #[error("the kept algorithms are for {theirs}, this is {ours}")]
    Elsewhere {
        /// What they are for.
        theirs: String,
        /// What is here.
        ours: String,
    },
    /// The library does not take one of them.
    #[error("cuBLASLt does not take the kept algorithm for {rows}x{inputs}x{outputs}: {code}")]
    Refused {
        /// Rows that it is for, at most.
        rows: usize,
        /// Columns of the weights.
        inputs: usize,
        /// Rows of the weights.
        outputs: usize,
        /// What the library says.
        code: String,
    },
    /// The device failed.
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

impl Algorithms {
    pub(super) fn new(place: Place, mut kept: Vec<Kept>) -> Self {
        kept.sort_by_key(|Kept { key, .. }| {
            let Key { shape, bucket, types } = *key;
            (shape.inputs, shape.outputs, bucket, types.inputs, types.output)
        });
        Self { place, kept }
    }

    pub(super) fn place(&self) -> &Place {
        &self.place
    }

    pub(super) fn kept(&self) -> &[Kept] {
        &self.kept
    }

    /// How many.
    #[must_use]
    pub fn len(&self) -> usize {
        self.kept.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.kept.is_empty()
    }

    /// The stored form: the same algorithms give the same bytes.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let Place { library, gpu, multiprocessors } = &self.place;
        let mut out = MAGIC.to_vec();
        out.extend(VERSION.to_le_bytes());
        out.extend(library.to_le_bytes());
        out.extend(multiprocessors.to_le_bytes());
        out.extend((gpu.len() as u32).to_le_bytes());
        out.extend(gpu.as_bytes());
        out.extend((self.kept.len() as u32).to_le_bytes());
        for Kept { key, algorithm } in &self.kept {
            for size in [key.shape.inputs, key.shape.outputs, key.bucket] {
                out.extend((size as u64).to_le_bytes());
            }
            for ty in [key.types.inputs, key.types.output] {
                out.extend((ty as u32).to_le_bytes());
            }
            for word in algorithm.0 {
                out.extend(word.to_le_bytes());
            }
        }
        let sum = checksum(&out);
        out.extend(sum.to_le_bytes());
        out
    }

    /// Reads the stored form.
    ///
    /// # Errors
    /// [`AlgorithmsError::Damaged`], whatever the bytes are.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, AlgorithmsError> {
        let damaged = |problem| AlgorithmsError::Damaged { problem };
        let short = || damaged("they end too early");
        let (body, sum) = bytes.split_last_chunk::<8>().ok_or_else(short)?;
        let mut rest = Rest(body);
        if rest.array().ok_or_else(short)? != MAGIC {
            return Err(damaged("they begin with something else"));
        }
        if rest.u32().ok_or_else(short)? != VERSION {
            return Err(damaged("they are of another version"));
        }
        if checksum(body) != u64::from_le_bytes(*sum) {
            return Err(damaged("their checksum is another"));
        }
        let library = rest.u64().ok_or_else(short)?;
        let multiprocessors = rest.u32().ok_or_else(short)?;
        let length = rest.u32().ok_or_else(short)? as usize;
        let name = rest.bytes(length).ok_or_else(short)?;
        let gpu = str::from_utf8(name).map_err(|_| damaged("the GPU's name is no text"))?.to_owned();
        let count = rest.u32().ok_or_else(short)? as usize;
        if count.checked_mul(ENTRY) != Some(rest.0.len()) {
            return Err(damaged("they hold another number of entries than they say"));
        }
        let entry =
            |_| rest.entry().ok_or_else(|| damaged("an entry has sizes or types that products do not"));
        let kept = (0..count).map(entry).collect::<Result<Vec<_>, _>>()?;
        Ok(Self::new(Place { library, gpu, multiprocessors }, kept))
    }
}

/// Bytes not yet read.
struct Rest<'a>(&'a [u8]);

impl<'a> Rest<'a> {
    fn bytes(&mut self, count: usize) -> Option<&'a [u8]> {
        let (read, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(read)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.bytes(N)?.try_into().ok()
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    fn entry(&mut self) -> Option<Kept> {
        let mut size = || self.u64().and_then(|size| usize::try_from(size).ok());
        let shape = GemmShape { inputs: size()?, outputs: size()? };
        let bucket = size().filter(|rows| bucket(*rows) == *rows)?;
        super::check(shape).ok()?;
        let inputs = data_type(self.u32()?).filter(|&ty| ty != cudaDataType::CUDA_R_32F)?;
        let output = data_type(self.u32()?)?;
        let mut words = [0; 8];
        for word in &mut words {
            *word = self.u64()?;
        }
        let key = Key { shape, bucket, types: Types { inputs, output } };
        Some(Kept { key, algorithm: Algorithm(words) })
    }
}

/// The types that products have, by CUDA's numbers.
fn data_type(number: u32) -> Option<cudaDataType> {
    [cudaDataType::CUDA_R_32F, cudaDataType::CUDA_R_16F, cudaDataType::CUDA_R_16BF]
        .into_iter()
        .find(|&ty| ty as u32 == number)
}

/// FNV-1a of 64 bits: any single byte that changes shows.
fn checksum(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |sum, &byte| (sum ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

#[cfg(test)]
mod tests;
