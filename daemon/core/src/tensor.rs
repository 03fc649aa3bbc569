//! Element types of tensors in model files.

use std::fmt;

/// Element type of a tensor in a model file. Quantised types are ggml's, as specified by its GGUF format.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[allow(non_camel_case_types)] // ggml's own names
pub enum TensorType {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// Upper half of an IEEE single.
    BF16,
    /// 32 x 4 bits, one scale.
    Q4_0,
    /// 32 x 4 bits, scale and minimum.
    Q4_1,
    /// 32 x 5 bits, one scale.
    Q5_0,
    /// 32 x 5 bits, scale and minimum.
    Q5_1,
    /// 32 x 8 bits, one scale.
    Q8_0,
    /// 256 x 4 bits, 6-bit scales and minima per 32.
    Q4_K,
    /// 256 x 5 bits, 6-bit scales and minima per 32.
    Q5_K,
    /// 256 x 6 bits, 8-bit scales per 16.
    Q6_K,
}

impl TensorType {
    /// Every type.
    pub const ALL: [Self; 11] = [
        Self::F32,
        Self::F16,
        Self::BF16,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q4_K,
        Self::Q5_K,
        Self::Q6_K,
    ];

    /// Elements in a block; a row is a whole number of blocks.
    #[must_use]
    pub const fn block_elements(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::BF16 => 1,
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 | Self::Q8_0 => 32,
            Self::Q4_K | Self::Q5_K | Self::Q6_K => 256,
        }
    }

    /// Bytes of a block.
    #[must_use]
    pub const fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q8_0 => 34,
            Self::Q4_K => 144,
            Self::Q5_K => 176,
            Self::Q6_K => 210,
        }
    }

    /// Bytes of a row of `columns` elements; `None` where it is no whole number of blocks, or overflows.
    #[must_use]
    pub const fn row_bytes(self, columns: usize) -> Option<usize> {
        if columns.is_multiple_of(self.block_elements()) {
            (columns / self.block_elements()).checked_mul(self.block_bytes())
        } else {
            None
        }
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}
