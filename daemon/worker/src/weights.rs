//! Where every tensor of a model lies in the weights arena.
//!
//! **Owns** the order, the stacking and the packed types. **Never** reads or writes a weight.
//!
//! Matrices that meet the same input are stacked where their packed types agree: `q|k|v` and `gate|up` are then one pass. Tied
//! embeddings are one matrix: the lookup unpacks its rows.

use pagedd_kernels::{MatrixLayout, PANEL_ROWS, PackedType};
use pagedd_model::{LayerTensor, ModelConfig, ModelSource, TensorInfo, TensorRole};

/// Alignment of everything in the arena, in bytes.
const ALIGN: usize = 64;

/// A matrix in the arena.
#[derive(Clone, PartialEq, Debug)]
pub struct MatrixPlace {
    /// Shape and packed type.
    pub layout: MatrixLayout,
    /// First byte in the arena's data.
    pub at: usize,
    /// The tensors stacked in it, each with its first row.
    pub parts: Vec<(TensorRole, usize)>,
}

/// Vectors of float32 in the arena, one after another.
#[derive(Clone, PartialEq, Debug)]
pub struct VectorPlace {
    /// First byte in the arena's data.
    pub at: usize,
    /// Elements in all.
    pub len: usize,
    /// The tensors in it, each with its first element.
    pub parts: Vec<(TensorRole, usize)>,
}

/// One layer.
#[derive(Clone, PartialEq, Debug)]
pub struct LayerPlaces {
    /// RMSNorm before attention.
    pub attn_norm: VectorPlace,
    /// Rows of Q, then K, then V.
    pub qkv: Vec<MatrixPlace>,
    /// Biases of Q, K and V; empty where the model has none.
    pub qkv_bias: VectorPlace,
    /// After attention.
    pub attn_output: MatrixPlace,
    /// RMSNorm before the feed-forward layer.
    pub ffn_norm: VectorPlace,
    /// Rows of gate, then up.
    pub gate_up: Vec<MatrixPlace>,
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
    /// The output matrix, where it is not the embedding.
    pub output: Option<MatrixPlace>,
    /// Bytes of all.
    pub bytes: usize,
}

/// The model lacks what its configuration implies, or is too large to be addressed.
#[derive(thiserror::Error, PartialEq, Eq, Debug)]
pub enum PlacesError {
    /// A tensor is not there.
    #[error("{0}: the tensor is missing")]
    Missing(TensorRole),
    /// Sizes overflow.
    #[error("{0}: its size overflows")]
    Overflow(TensorRole),
}

impl Places {
    /// Places every tensor.
    ///
    /// # Errors
    /// [`PlacesError`] with the tensor named.
    pub fn new(source: &ModelSource, f32_throughout: bool) -> Result<Self, PlacesError> {
        let mut builder = Builder { source, f32_throughout, end: 0 };
        let config = source.config();
        let token_embd = builder.matrix(TensorRole::TokenEmbd)?;
        let layers = (0..config.layers as u32).map(|i| builder.layer(i, config)).collect::<Result<_, _>>()?;
        let output_norm = builder.vectors(&[TensorRole::OutputNorm])?;
        let output = if config.tied_embeddings { None } else { Some(builder.matrix(TensorRole::Output)?) };
        Ok(Self { layers, token_embd, output_norm, output, bytes: builder.end })
    }

    /// Every matrix.
    pub fn matrices(&self) -> impl Iterator<Item = &MatrixPlace> {
        let layers = self.layers.iter().flat_map(|l| {
            l.qkv.iter().chain(&l.gate_up).chain([&l.attn_output, &l.ffn_down])
        });
        layers.chain([&self.token_embd]).chain(&self.output)
    }

    /// Every vector.
    pub fn vectors(&self) -> impl Iterator<Item = &VectorPlace> {
        let layers = self.layers.iter().flat_map(|l| [&l.attn_norm, &l.qkv_bias, &l.ffn_norm]);
        layers.chain([&self.output_norm])
    }
}

struct Builder<'a> {
    source: &'a ModelSource,
    f32_throughout: bool,
    end: usize,
}

impl Builder<'_> {
    fn layer(&mut self, i: u32, config: &ModelConfig) -> Result<LayerPlaces, PlacesError> {
        use LayerTensor as T;
        let of = |tensor| TensorRole::Layer(i, tensor);
        let biases = [of(T::AttnQBias), of(T::AttnKBias), of(T::AttnVBias)];
        Ok(LayerPlaces {
            attn_norm: self.vectors(&[of(T::AttnNorm)])?,
            qkv: self.stack(&[of(T::AttnQ), of(T::AttnK), of(T::AttnV)])?,
            qkv_bias: self.vectors(if config.qkv_bias { &biases } else { &[] })?,
            attn_output: self.matrix(of(T::AttnOutput))?,
            ffn_norm: self.vectors(&[of(T::FfnNorm)])?,
            gate_up: self.stack(&[of(T::FfnGate), of(T::FfnUp)])?,
            ffn_down: self.matrix(of(T::FfnDown))?,
        })
    }

    fn tensor(&self, role: TensorRole) -> Result<&TensorInfo, PlacesError> {
        self.source.tensor(role).ok_or(PlacesError::Missing(role))
    }

    fn take(&mut self, role: TensorRole, bytes: usize) -> Result<usize, PlacesError> {
        let at = self.end;
        let end = at.checked_add(bytes).and_then(|end| end.checked_next_multiple_of(ALIGN));
        self.end = end.ok_or(PlacesError::Overflow(role))?;
        Ok(at)
    }

    fn matrix(&mut self, role: TensorRole) -> Result<MatrixPlace, PlacesError> {
        let layout = self.layout(role)?;
        Ok(MatrixPlace { layout, at: self.take(role, layout.bytes())?, parts: vec![(role, 0)] })
    }

    fn layout(&self, role: TensorRole) -> Result<MatrixLayout, PlacesError> {
        let tensor = self.tensor(role)?;
        let ty = PackedType::for_source(tensor.ty, self.f32_throughout);
        Ok(MatrixLayout { ty, rows: tensor.rows, cols: tensor.columns })
    }

    /// Consecutive tensors of one packed type become one matrix, as long as each begins on a panel.
    fn stack(&mut self, roles: &[TensorRole]) -> Result<Vec<MatrixPlace>, PlacesError> {
        let mut stack: Vec<MatrixPlace> = Vec::new();
        for &role in roles {
            let layout = self.layout(role)?;
            match stack.last_mut() {
                Some(last)
                    if last.layout.ty == layout.ty
                        && last.layout.cols == layout.cols
                        && last.layout.rows.is_multiple_of(PANEL_ROWS) =>
                {
                    last.parts.push((role, last.layout.rows));
                    last.layout.rows += layout.rows;
                }
                _ => stack.push(MatrixPlace { layout, at: 0, parts: vec![(role, 0)] }),
            }
        }
        for place in &mut stack {
            place.at = self.take(place.parts[0].0, place.layout.bytes())?;
        }
        Ok(stack)
    }

    fn vectors(&mut self, roles: &[TensorRole]) -> Result<VectorPlace, PlacesError> {
        let (mut len, mut parts) = (0_usize, Vec::new());
        for &role in roles {
            parts.push((role, len));
            len += self.tensor(role)?.columns;
        }
        let at = self.take(roles.first().copied().unwrap_or(TensorRole::OutputNorm), len * size_of::<f32>())?;
        Ok(VectorPlace { at, len, parts })
    }
}
