//! What a decoder is, and where its weights lie.

use crate::cpu::ops::Pairing;
use crate::cuda::error::CudaError;
use crate::cuda::norm::{PACK, dimension};
use crate::error::{ShapeError, product};

/// Alignment of every tensor, in bytes.
const ALIGN: usize = 256;

/// Dimensions and constants of a decoder: pre-norm (RMSNorm), grouped-query attention with RoPE, SwiGLU.
#[derive(Clone, PartialEq, Debug)]
pub struct DecoderShape {
    /// Layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the feed-forward layer.
    pub ffn: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Rows of embedding and output matrix.
    pub vocabulary: usize,
    /// The output matrix is the embedding.
    pub tied: bool,
    /// Queries, keys and values have biases.
    pub bias: bool,
    /// Of RMSNorm.
    pub epsilon: f32,
    /// Radians per position of each turning pair.
    pub frequencies: Vec<f32>,
    /// A factor on cosines and sines.
    pub magnitude: f32,
    /// Which elements turn together.
    pub pairing: Pairing,
}

impl DecoderShape {
    /// Elements of a token's queries.
    #[must_use]
    pub fn query_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Elements of a token's queries, keys and values.
    #[must_use]
    pub fn qkv_width(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// # Errors
    /// The dimension that kernels do not work with.
    pub(super) fn check(&self) -> Result<(), CudaError> {
        let widths = [
            ("hidden size", self.hidden),
            ("feed-forward size", self.ffn),
            ("vocabulary", self.vocabulary),
            ("queries, keys and values", self.qkv_width()),
        ];
        for (what, width) in widths {
            if width == 0 || !width.is_multiple_of(PACK) {
                return Err(dimension(what, "a positive multiple of 8", width));
            }
        }
        if self.layers == 0 {
            return Err(dimension("layers", "positive", 0));
        }
        Ok(())
    }
}

/// A tensor's place among the weights: its first byte and its elements.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place {
    /// First byte.
    pub at: usize,
    /// Elements.
    pub len: usize,
}

impl Place {
    /// The part of it from element `first` on, `len` elements of `size` bytes.
    #[must_use]
    pub fn part(self, first: usize, len: usize, size: usize) -> Self {
        Self { at: self.at + first * size, len }
    }
}

/// The tensors of a layer. Matrices are `[outputs][inputs]` of 16-bit elements, vectors have single precision.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LayerPlaces {
    /// RMSNorm before attention.
    pub attn_norm: Place,
    /// Rows of queries, then keys, then values.
    pub qkv: Place,
    /// Biases of the same.
    pub bias: Option<Place>,
    /// After attention.
    pub attn_output: Place,
    /// RMSNorm before the feed-forward layer.
    pub ffn_norm: Place,
    /// Rows of gate, then up.
    pub gate_up: Place,
    /// Back to the residual stream.
    pub ffn_down: Place,
}

/// Where every tensor of a decoder lies: a function of its shape.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DecoderPlaces {
    /// A row per token.
    pub embedding: Place,
    /// By layer.
    pub layers: Vec<LayerPlaces>,
    /// RMSNorm after the last layer.
    pub output_norm: Place,
    /// The output matrix; the embedding where they are tied.
    pub output: Place,
    /// Bytes of all.
    pub bytes: usize,
}

/// Hands out places, one after the other.
struct Row {
    end: usize,
}

impl Row {
    fn take(&mut self, what: &'static str, sides: &[usize], size: usize) -> Result<Place, ShapeError> {
        let len = product(what, sides)?;
        let at = self.end;
        let end =
            product(what, &[len, size])?.checked_add(at).and_then(|end| end.checked_next_multiple_of(ALIGN));
        self.end = end.ok_or(ShapeError::Overflow { what })?;
        Ok(Place { at, len })
    }

    fn matrix(&mut self, what: &'static str, outputs: usize, inputs: usize) -> Result<Place, ShapeError> {
        self.take(what, &[outputs, inputs], 2)
    }

    fn vector(&mut self, what: &'static str, len: usize) -> Result<Place, ShapeError> {
        self.take(what, &[len], size_of::<f32>())
    }
}

impl DecoderPlaces {
    /// Places every tensor of `shape`.
    ///
    /// # Errors
    /// A dimension that kernels do not work with, or sizes overflow.
    pub fn new(shape: &DecoderShape) -> Result<Self, CudaError> {
        shape.check()?;
        let DecoderShape { hidden, ffn, vocabulary, .. } = *shape;
        let mut row = Row { end: 0 };
        let embedding = row.matrix("embedding", vocabulary, hidden)?;
        let layer = |row: &mut Row| {
            Ok(LayerPlaces {
                attn_norm: row.vector("attention norm", hidden)?,
                qkv: row.matrix("queries, keys and values", shape.qkv_width(), hidden)?,
                bias: if shape.bias { Some(row.vector("bias", shape.qkv_width())?) } else { None },
                attn_output: row.matrix("attention output", hidden, shape.query_width())?,
                ffn_norm: row.vector("feed-forward norm", hidden)?,
                gate_up: row.matrix("gate and up", 2 * ffn, hidden)?,
                ffn_down: row.matrix("down", hidden, ffn)?,
            })
        };
        let layers = (0..shape.layers).map(|_| layer(&mut row)).collect::<Result<_, ShapeError>>()?;
        let output_norm = row.vector("output norm", hidden)?;
        let output = if shape.tied { embedding } else { row.matrix("output", vocabulary, hidden)? };
        Ok(Self { embedding, layers, output_norm, output, bytes: row.end })
    }
}
