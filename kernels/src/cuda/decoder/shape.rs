//! What a decoder is, and where its weights lie.

use crate::cpu::ops::Pairing;
use crate::cuda::error::CudaError;
use crate::cuda::gemm::GemmShape;
use crate::cuda::norm::{PACK, dimension};
use crate::error::{ShapeError, length, product};
use crate::four_bit::{DecoderForms, FOUR_BIT_TILE, Form, LayerForms, four_bit_bytes};

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

/// A matrix's place among the weights: `[outputs][inputs]`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MatrixPlace {
    /// First byte.
    pub at: usize,
    /// Its sides.
    pub shape: GemmShape,
    /// Elements, or tiles.
    pub form: Form,
}

impl MatrixPlace {
    /// Where it lies, as elements of 16 bits, or as bytes of tiles.
    #[must_use]
    pub fn place(&self) -> Place {
        let GemmShape { inputs, outputs } = self.shape;
        let len = match self.form {
            Form::Half => outputs * inputs,
            Form::FourBit => four_bit_bytes(outputs, inputs).unwrap_or(0),
        };
        Place { at: self.at, len }
    }
}

/// The tensors of a layer. Vectors have single precision.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LayerPlaces {
    /// RMSNorm before attention.
    pub attn_norm: Place,
    /// Rows of queries, then keys, then values.
    pub qkv: MatrixPlace,
    /// Biases of the same.
    pub bias: Option<Place>,
    /// After attention.
    pub attn_output: MatrixPlace,
    /// RMSNorm before the feed-forward layer.
    pub ffn_norm: Place,
    /// Rows of gate, then up; in four bits interleaved.
    pub gate_up: MatrixPlace,
    /// Back to the residual stream.
    pub ffn_down: MatrixPlace,
}

/// Where every tensor of a decoder lies: a function of its shape and of its matrices' forms.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DecoderPlaces {
    /// A row per token.
    pub embedding: Place,
    /// By layer.
    pub layers: Vec<LayerPlaces>,
    /// RMSNorm after the last layer.
    pub output_norm: Place,
    /// The output matrix; the embedding where they are tied, unless it has four bits.
    pub output: MatrixPlace,
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

    fn matrix(
        &mut self,
        what: &'static str,
        (outputs, inputs): (usize, usize),
        form: Form,
    ) -> Result<MatrixPlace, ShapeError> {
        let shape = GemmShape { inputs, outputs };
        let place = match form {
            Form::Half => self.take(what, &[outputs, inputs], 2)?,
            Form::FourBit => {
                let bytes = four_bit_bytes(outputs, inputs).ok_or_else(|| {
                    let (needed, found) = if outputs.is_multiple_of(FOUR_BIT_TILE) {
                        ("inputs in units of 64", inputs)
                    } else {
                        ("outputs in tiles of 16", outputs)
                    };
                    ShapeError::Dimension { what, needed, found }
                })?;
                self.take(what, &[bytes], 1)?
            }
        };
        Ok(MatrixPlace { at: place.at, shape, form })
    }

    fn vector(&mut self, what: &'static str, len: usize) -> Result<Place, ShapeError> {
        self.take(what, &[len], size_of::<f32>())
    }
}

impl DecoderPlaces {
    /// Places every tensor of `shape`.
    ///
    /// # Errors
    /// A dimension that kernels do not work with, forms of another number of layers, or sizes overflow.
    pub fn new(shape: &DecoderShape, forms: &DecoderForms) -> Result<Self, CudaError> {
        shape.check()?;
        length("forms of layers", shape.layers, forms.layers.len())?;
        let DecoderShape { hidden, ffn, vocabulary, .. } = *shape;
        let mut row = Row { end: 0 };
        let table = row.matrix("embedding", (vocabulary, hidden), Form::Half)?;
        let layer = |row: &mut Row, forms: &LayerForms| {
            Ok(LayerPlaces {
                attn_norm: row.vector("attention norm", hidden)?,
                qkv: row.matrix("queries, keys and values", (shape.qkv_width(), hidden), forms.qkv)?,
                bias: if shape.bias { Some(row.vector("bias", shape.qkv_width())?) } else { None },
                attn_output: row.matrix(
                    "attention output",
                    (hidden, shape.query_width()),
                    forms.attn_output,
                )?,
                ffn_norm: row.vector("feed-forward norm", hidden)?,
                gate_up: row.matrix("gate and up", (2 * ffn, hidden), forms.gate_up)?,
                ffn_down: row.matrix("down", (hidden, ffn), forms.ffn_down)?,
            })
        };
        let layers =
            forms.layers.iter().map(|forms| layer(&mut row, forms)).collect::<Result<_, ShapeError>>()?;
        let output_norm = row.vector("output norm", hidden)?;
        let output = if shape.tied && forms.output == Form::Half {
            table
        } else {
            row.matrix("output", (vocabulary, hidden), forms.output)?
        };
        Ok(Self { embedding: table.place(), layers, output_norm, output, bytes: row.end })
    }
}

/// Elements of the largest matrix of four bits: what is needed to widen one.
pub(super) fn widest(shape: &DecoderShape, forms: &DecoderForms) -> usize {
    let DecoderShape { hidden, ffn, vocabulary, .. } = *shape;
    let of_layer = |forms: &LayerForms| {
        let LayerForms { qkv, attn_output, gate_up, ffn_down } = *forms;
        let query = shape.query_width();
        [
            (qkv, shape.qkv_width() * hidden),
            (attn_output, query * hidden),
            (gate_up, 2 * ffn * hidden),
            (ffn_down, ffn * hidden),
        ]
    };
    let all = forms.layers.iter().flat_map(of_layer).chain([(forms.output, vocabulary * hidden)]);
    all.filter(|&(form, _)| form == Form::FourBit).map(|(_, elements)| elements).max().unwrap_or(0)
}
