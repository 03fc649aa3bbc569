//! Where every tensor of a model lies in the weights arena.
//!
//! **Owns** the order and the packed types. **Never** reads or writes a weight.
//!
//! Tied embeddings are one matrix: the lookup unpacks its rows.

use pagedd_kernels::{Matrix, MatrixLayout, PackedType, ShapeError};
use pagedd_model::{LayerTensor, ModelConfig, ModelSource, TensorInfo, TensorRole};

/// Alignment of everything in the arena, in bytes.
const ALIGN: usize = 64;

/// A matrix in the arena.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct MatrixPlace {
    /// Its tensor.
    pub role: TensorRole,
    /// Shape and packed type.
    pub layout: MatrixLayout,
    /// First byte in the arena's data.
    pub at: usize,
}

impl MatrixPlace {
    /// The matrix in an arena that was filled by these places.
    ///
    /// # Errors
    /// The arena is too short.
    pub fn of<'a>(&self, arena: &'a [u8]) -> Result<Matrix<'a>, ShapeError> {
        let bytes = arena.get(self.at..self.at + self.layout.bytes()).unwrap_or_default();
        Matrix::new(self.layout, bytes)
    }
}

/// A vector of float32 in the arena.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct VectorPlace {
    /// Its tensor.
    pub role: TensorRole,
    /// Elements.
    pub len: usize,
    /// First byte in the arena's data.
    pub at: usize,
}

impl VectorPlace {
    /// A copy of the vector: small, and needed as float32 in every step.
    pub fn of(&self, arena: &[u8]) -> Vec<f32> {
        let bytes = arena.get(self.at..self.at + self.len * size_of::<f32>()).unwrap_or_default();
        bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
    }
}

/// One layer.
#[derive(Clone, PartialEq, Debug)]
pub struct LayerPlaces {
    /// RMSNorm before attention.
    pub attn_norm: VectorPlace,
    /// Q, K and V.
    pub qkv: [MatrixPlace; 3],
    /// Biases of Q, K and V, where the model has them.
    pub qkv_bias: Option<[VectorPlace; 3]>,
    /// After attention.
    pub attn_output: MatrixPlace,
    /// RMSNorm before the feed-forward layer.
    pub ffn_norm: VectorPlace,
    /// Gate and up.
    pub gate_up: [MatrixPlace; 2],
    /// Back to the residual stream.
    pub ffn_down: MatrixPlace,
}

/// All of a model.
#[derive(Clone, PartialEq, Debug)]
pub struct Places {
    /// By layer.
    pub layers: Vec<LayerPlaces>,
    /// A row per token.
    pub token_embd: MatrixPlace,
    /// RMSNorm after the last layer.
    pub output_norm: VectorPlace,
    /// The output matrix: the embedding where they are tied.
    pub output: MatrixPlace,
    /// Bytes of all.
    pub bytes: usize,
    /// Number of weights.
    pub parameters: u64,
}

/// A tensor that cannot be placed.
#[derive(thiserror::Error, PartialEq, Eq, Debug)]
pub enum PlacesError {
    /// It is not there.
    #[error("{0}: the tensor is missing")]
    Missing(TensorRole),
    /// Sizes overflow.
    #[error("{0}: its size overflows")]
    Overflow(TensorRole),
    /// No kernel multiplies with it.
    #[error("{role}: {problem}")]
    Shape {
        /// The tensor.
        role: TensorRole,
        /// What is wrong with its shape.
        problem: ShapeError,
    },
}

impl Places {
    /// Places every tensor.
    ///
    /// # Errors
    /// [`PlacesError`] with the tensor named.
    pub fn new(source: &ModelSource, f32_throughout: bool) -> Result<Self, PlacesError> {
        let mut builder = Builder { source, f32_throughout, end: 0, parameters: 0 };
        let config = source.config();
        let token_embd = builder.matrix(TensorRole::TokenEmbd)?;
        let layers = (0..config.layers as u32).map(|i| builder.layer(i, config)).collect::<Result<_, _>>()?;
        let output_norm = builder.vector(TensorRole::OutputNorm)?;
        let output = if config.tied_embeddings { token_embd } else { builder.matrix(TensorRole::Output)? };
        let Builder { end: bytes, parameters, .. } = builder;
        Ok(Self { layers, token_embd, output_norm, output, bytes, parameters })
    }

    /// Every matrix, once.
    pub fn matrices(&self) -> impl Iterator<Item = &MatrixPlace> {
        let layers = self
            .layers
            .iter()
            .flat_map(|l| l.qkv.iter().chain([&l.attn_output]).chain(&l.gate_up).chain([&l.ffn_down]));
        let tied = self.output.at == self.token_embd.at;
        layers.chain([&self.token_embd]).chain((!tied).then_some(&self.output))
    }

    /// Every vector.
    pub fn vectors(&self) -> impl Iterator<Item = &VectorPlace> {
        let layers = self
            .layers
            .iter()
            .flat_map(|l| [&l.attn_norm, &l.ffn_norm].into_iter().chain(l.qkv_bias.iter().flatten()));
        layers.chain([&self.output_norm])
    }
}

struct Builder<'a> {
    source: &'a ModelSource,
    f32_throughout: bool,
    end: usize,
    parameters: u64,
}

impl Builder<'_> {
    fn layer(&mut self, i: u32, config: &ModelConfig) -> Result<LayerPlaces, PlacesError> {
        use LayerTensor as T;
        let of = |tensor| TensorRole::Layer(i, tensor);
        let qkv_bias = if config.qkv_bias {
            Some([
                self.vector(of(T::AttnQBias))?,
                self.vector(of(T::AttnKBias))?,
                self.vector(of(T::AttnVBias))?,
            ])
        } else {
            None
        };
        Ok(LayerPlaces {
            attn_norm: self.vector(of(T::AttnNorm))?,
            qkv: [self.matrix(of(T::AttnQ))?, self.matrix(of(T::AttnK))?, self.matrix(of(T::AttnV))?],
            qkv_bias,
            attn_output: self.matrix(of(T::AttnOutput))?,
            ffn_norm: self.vector(of(T::FfnNorm))?,
            gate_up: [self.matrix(of(T::FfnGate))?, self.matrix(of(T::FfnUp))?],
            ffn_down: self.matrix(of(T::FfnDown))?,
        })
    }

    fn tensor(&mut self, role: TensorRole) -> Result<&TensorInfo, PlacesError> {
        let tensor = self.source.tensor(role).ok_or(PlacesError::Missing(role))?;
        self.parameters += tensor.rows as u64 * tensor.columns as u64;
        Ok(tensor)
    }

    fn take(&mut self, role: TensorRole, bytes: usize) -> Result<usize, PlacesError> {
        let at = self.end;
        let end = at.checked_add(bytes).and_then(|end| end.checked_next_multiple_of(ALIGN));
        self.end = end.ok_or(PlacesError::Overflow(role))?;
        Ok(at)
    }

    fn matrix(&mut self, role: TensorRole) -> Result<MatrixPlace, PlacesError> {
        let f32_throughout = self.f32_throughout;
        let tensor = self.tensor(role)?;
        let ty = PackedType::for_source(tensor.ty, f32_throughout);
        let layout = MatrixLayout::new(ty, tensor.rows, tensor.columns)
            .map_err(|problem| PlacesError::Shape { role, problem })?;
        Ok(MatrixPlace { role, layout, at: self.take(role, layout.bytes())? })
    }

    fn vector(&mut self, role: TensorRole) -> Result<VectorPlace, PlacesError> {
        let len = self.tensor(role)?.columns;
        let bytes = len.checked_mul(size_of::<f32>()).ok_or(PlacesError::Overflow(role))?;
        Ok(VectorPlace { role, len, at: self.take(role, bytes)? })
    }
}
