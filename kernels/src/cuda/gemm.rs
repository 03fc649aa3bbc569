//! Dense products through cuBLASLt, with algorithms kept.
//!
//! **Owns** which algorithm multiplies which shape: one for each shape and bucket of rows, chosen once and kept, so that a row's bits do not
//! depend on what was multiplied before. **Never** allocates behind a product: the workspace is one, of a fixed size.
#![allow(unsafe_code)]

mod stored;
mod tune;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::c_void;
use std::fmt;

use cudarc::cublaslt::result::{self as lt, CublasError};
use cudarc::cublaslt::sys::{self, cublasLtMatrixLayout_t as LayoutHandle};

use super::buffer::{Buffer, Plain, View, ViewMut};
use super::error::CudaError;
use super::launch::Half;
use super::norm::dimension;
use super::stream::Stream;
use crate::error::{length, product};

pub use stored::{Algorithms, AlgorithmsError};
use stored::{Kept, Place};
pub use tune::{Tuned, Tuning};

/// Bytes that products may use beside their operands.
const WORKSPACE: usize = 32 << 20;

/// Rows that an algorithm is chosen for which is to serve any number.
const ROWS_OF_ALL: usize = 256;
/// Algorithms looked through for one that sums in one go.
const PROPOSALS: usize = 64;

/// What a product gives: elements like its inputs, or single precision (logits).
pub trait GemmOutput: Plain + sealed::Sealed {
    /// cuBLAS's name of the type.
    #[doc(hidden)]
    const CUDA_TYPE: sys::cudaDataType;
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for half::bf16 {}
    impl Sealed for half::f16 {}
}

impl GemmOutput for f32 {
    const CUDA_TYPE: sys::cudaDataType = sys::cudaDataType::CUDA_R_32F;
}
impl GemmOutput for half::bf16 {
    const CUDA_TYPE: sys::cudaDataType = <Self as Half>::CUDA_TYPE;
}
impl GemmOutput for half::f16 {
    const CUDA_TYPE: sys::cudaDataType = <Self as Half>::CUDA_TYPE;
}

/// What a product is, apart from its rows: `out[rows][outputs] = x[rows][inputs] · weights[outputs][inputs]ᵀ`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct GemmShape {
    /// Columns of `x` and of the weights: a multiple of 8.
    pub inputs: usize,
    /// Rows of the weights: a multiple of 8.
    pub outputs: usize,
}

/// How a product is computed, as cuBLASLt keeps it: good for the same version of the library on the same kind of GPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Algorithm([u64; 8]);

/// Products of one stream.
pub struct Gemm {
    handle: Handle,
    workspace: Buffer<u8>,
    plans: HashMap<Key, Plan>,
    place: Place,
    one_for_all_rows: bool,
}

/// Rows are rounded up to those of a [`bucket`]: what lies between two shares an algorithm.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Key {
    shape: GemmShape,
    bucket: usize,
    types: Types,
}

/// Types of the elements of a product.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Types {
    inputs: sys::cudaDataType,
    output: sys::cudaDataType,
}

impl Types {
    fn of<T: Half, O: GemmOutput>() -> Self {
        Self { inputs: T::CUDA_TYPE, output: O::CUDA_TYPE }
    }
}

impl Gemm {
    /// Loads the library; products allocate nothing after.
    ///
    /// # Errors
    /// The library is missing, not enough memory, or the device failed.
    pub fn new(stream: &Stream) -> Result<Self, CudaError> {
        let library = products_version()?;
        stream.device().bind()?;
        let handle = Handle(lt::create_handle().map_err(failed("opening cuBLASLt"))?);
        let info = stream.device().info();
        let place = Place { library, gpu: info.name.clone(), multiprocessors: info.multiprocessors };
        let workspace = Buffer::zeroed(stream, WORKSPACE)?;
        Ok(Self { handle, workspace, plans: HashMap::new(), place, one_for_all_rows: false })
    }

    /// From here on a shape has one algorithm for any number of rows, which adds up each element of a product in one go: a row's bits do not
    /// depend on how many others there are. Slower than what is best for each number.
    pub fn use_one_for_all_rows(&mut self) {
        self.plans.clear();
        self.one_for_all_rows = true;
    }

    /// Queues `out[rows][outputs] = x[rows][inputs] · weights[outputs][inputs]ᵀ`, added up in single precision, rounded once.
    ///
    /// # Errors
    /// The shapes do not fit (nothing was launched), cuBLASLt has no algorithm for them, or the device failed.
    pub fn multiply<T: Half, O: GemmOutput>(
        &mut self,
        stream: &Stream,
        shape: GemmShape,
        x: View<'_, T>,
        weights: View<'_, T>,
        out: &mut ViewMut<'_, O>,
    ) -> Result<(), CudaError> {
        let GemmShape { inputs, outputs } = shape;
        check(shape)?;
        length("weights", product("weights", &[outputs, inputs])?, weights.len())?;
        let rows = x.len() / inputs;
        length("product input", product("product input", &[rows, inputs])?, x.len())?;
        length("product output", product("product output", &[rows, outputs])?, out.len())?;
        if rows == 0 {
            return Ok(());
        }
        for address in [x.address(), weights.address(), out.address()] {
            if !address.is_multiple_of(16) {
                return Err(dimension("operand", "at a multiple of 16 bytes", address as usize));
            }
        }
        stream.device().bind()?;
        let (handle, workspace) = (self.handle.0, self.workspace.all_mut().address());
        let plan = self.plan::<T, O>(shape, rows)?;
        plan.set_rows(rows)?;
        let (one, zero) = (1.0_f32, 0.0_f32);
        // SAFETY: the layouts describe the three operands, whose lengths were checked above; cuBLASLt reads `x` and `weights`, writes `out`
        // and at most `WORKSPACE` bytes of the workspace, which only products of this value use, on one stream. Scales are read at once.
        unsafe {
            lt::matmul(
                handle,
                plan.operation.0,
                (&raw const one).cast::<c_void>(),
                (&raw const zero).cast::<c_void>(),
                weights.address() as *const c_void,
                plan.weights.0,
                x.address() as *const c_void,
                plan.x.0,
                out.address() as *const c_void,
                plan.out.0,
                out.address() as *mut c_void,
                plan.out.0,
                &raw const plan.algorithm,
                workspace as *mut c_void,
                WORKSPACE,
                stream.inner().cu_stream().cast(),
            )
        }
        .map_err(failed("matrix product"))
    }

    /// Algorithms that cuBLASLt proposes for a shape and these rows, at most `most`, the one it thinks fastest first.
    ///
    /// # Errors
    /// There is none, or the device failed.
    pub fn proposals<T: Half, O: GemmOutput>(
        &self,
        shape: GemmShape,
        rows: usize,
        most: usize,
    ) -> Result<Vec<Algorithm>, CudaError> {
        check(shape)?;
        let plan = Plan::new(Types::of::<T, O>(), shape, bucket(rows))?;
        let found = plan.proposals(&self.handle, most)?;
        Ok(found.into_iter().map(|algorithm| Algorithm(algorithm.data)).collect())
    }

    /// Keeps `algorithm` for a shape and all rows of the bucket that `rows` is in.
    ///
    /// # Errors
    /// The device failed.
    pub fn keep<T: Half, O: GemmOutput>(
        &mut self,
        shape: GemmShape,
        rows: usize,
        algorithm: Algorithm,
    ) -> Result<(), CudaError> {
        let key = self.key::<T, O>(shape, rows);
        self.plans.insert(key, Plan::with(key, algorithm)?);
        Ok(())
    }

    /// All algorithms that are kept: those chosen without being asked for, too.
    #[must_use]
    pub fn algorithms(&self) -> Algorithms {
        let kept = |(&key, plan): (&Key, &Plan)| Kept { key, algorithm: Algorithm(plan.algorithm.data) };
        Algorithms::new(self.place.clone(), self.plans.iter().map(kept).collect())
    }

    /// Keeps what another value of this type kept, so that products have the same bits; says how many.
    ///
    /// # Errors
    /// They are for another library or GPU, or the library takes one of them no more, or the device failed. Nothing has been kept.
    pub fn restore(&mut self, algorithms: &Algorithms) -> Result<usize, AlgorithmsError> {
        if *algorithms.place() != self.place {
            let [theirs, ours] = [algorithms.place(), &self.place].map(ToString::to_string);
            return Err(AlgorithmsError::Elsewhere { theirs, ours });
        }
        let plan = |kept: &Kept| -> Result<(Key, Plan), AlgorithmsError> {
            let plan = Plan::with(kept.key, kept.algorithm)?;
            let GemmShape { inputs, outputs } = kept.key.shape;
            plan.taken_by(&self.handle).map_err(|code| AlgorithmsError::Refused {
                rows: kept.key.bucket,
                inputs,
                outputs,
                code,
            })?;
            Ok((kept.key, plan))
        };
        let plans = algorithms.kept().iter().map(plan).collect::<Result<Vec<_>, _>>()?;
        let count = plans.len();
        self.plans.extend(plans);
        Ok(count)
    }

    fn plan<T: Half, O: GemmOutput>(
        &mut self,
        shape: GemmShape,
        rows: usize,
    ) -> Result<&mut Plan, CudaError> {
        let key = self.key::<T, O>(shape, rows);
        match self.plans.entry(key) {
            Entry::Occupied(entry) => Ok(entry.into_mut()),
            Entry::Vacant(entry) => {
                let mut plan = Plan::new(key.types, shape, key.bucket)?;
                plan.algorithm = if self.one_for_all_rows {
                    let found = plan.proposals(&self.handle, PROPOSALS)?.into_iter().find(adds_up_in_one_go);
                    found
                        .ok_or_else(|| no_algorithm("cuBLASLt has none without split sums for this shape"))?
                } else {
                    plan.proposals(&self.handle, 1)?[0]
                };
                Ok(entry.insert(plan))
            }
        }
    }

    fn key<T: Half, O: GemmOutput>(&self, shape: GemmShape, rows: usize) -> Key {
        let bucket = if self.one_for_all_rows { ROWS_OF_ALL } else { bucket(rows) };
        Key { shape, bucket, types: Types::of::<T, O>() }
    }
}

/// Version of cuBLASLt: with another, products may have other last bits.
///
/// # Errors
/// The library is missing.
pub fn products_version() -> Result<u64, CudaError> {
    // SAFETY: only looks for the library and loads it; its initialisers are NVIDIA's own.
    if !unsafe { sys::is_culib_present() } {
        return Err(CudaError::NoLibrary { library: "libcublasLt" });
    }
    // SAFETY: the library is there; it gives a number.
    Ok(unsafe { sys::cublasLtGetVersion() } as u64)
}

/// Whether each element of a product is one sum, whatever its place: nothing is split along the inner dimension.
fn adds_up_in_one_go(algorithm: &sys::cublasLtMatmulAlgo_t) -> bool {
    use sys::cublasLtMatmulAlgoConfigAttributes_t as Attribute;
    let number = |attribute| {
        let mut value = 0_u32;
        let mut written = 0_usize;
        // SAFETY: the algorithm is one that the library proposed; the attributes asked for are 32-bit integers.
        let answer = unsafe {
            sys::cublasLtMatmulAlgoConfigGetAttribute(
                algorithm,
                attribute,
                (&raw mut value).cast::<c_void>(),
                size_of::<u32>(),
                &raw mut written,
            )
        };
        (answer.result().is_ok() && written == size_of::<u32>()).then_some(value)
    };
    let split = number(Attribute::CUBLASLT_ALGO_CONFIG_SPLITK_NUM);
    let reduction = number(Attribute::CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME);
    matches!(split, Some(0 | 1)) && reduction == Some(0)
}

fn no_algorithm(code: &str) -> CudaError {
    CudaError::Device { doing: "choosing an algorithm", code: code.to_owned() }
}

impl fmt::Debug for Gemm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gemm").field("plans", &self.plans.len()).finish_non_exhaustive()
    }
}

/// The largest number of rows that shares an algorithm with `rows`: powers of two, and steps of 64 from 128 to 512, where a product takes
/// as long as its tiles, no longer as long as its weights take to read.
pub(super) fn bucket(rows: usize) -> usize {
    match rows {
        129..=512 => rows.next_multiple_of(64),
        _ => rows.checked_next_power_of_two().unwrap_or(usize::MAX),
    }
}

fn check(shape: GemmShape) -> Result<(), CudaError> {
    for size in [shape.inputs, shape.outputs] {
        if size == 0 || !size.is_multiple_of(8) {
            return Err(dimension("side of a weight matrix", "a positive multiple of 8", size));
        }
    }
    Ok(())
}

fn failed(doing: &'static str) -> impl Fn(CublasError) -> CudaError {
    move |error| CudaError::Device { doing, code: format!("{:?}", error.0) }
}

/// cuBLASLt thinks in columns: its product is `out[outputs, rows] = weights[inputs, outputs]ᵀ · x[inputs, rows]`.
struct Plan {
    operation: Operation,
    weights: Layout,
    x: Layout,
    out: Layout,
    rows: usize,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

impl Plan {
    /// A plan for `rows` rows, without an algorithm yet.
    fn new(types: Types, shape: GemmShape, rows: usize) -> Result<Self, CudaError> {
        let GemmShape { inputs, outputs } = shape;
        Ok(Self {
            operation: Operation::transposed_times_plain()?,
            weights: Layout::new(types.inputs, inputs, outputs)?,
            x: Layout::new(types.inputs, inputs, rows)?,
            out: Layout::new(types.output, outputs, rows)?,
            rows,
            algorithm: sys::cublasLtMatmulAlgo_t { data: [0; 8] },
        })
    }

    fn with(key: Key, algorithm: Algorithm) -> Result<Self, CudaError> {
        check(key.shape)?;
        let mut plan = Self::new(key.types, key.shape, key.bucket)?;
        plan.algorithm.data = algorithm.0;
        Ok(plan)
    }

    /// Whether the library would run the plan's algorithm in the workspace that products have; why not.
    fn taken_by(&self, handle: &Handle) -> Result<(), String> {
        let mut found = NO_PROPOSAL;
        // SAFETY: all handles are alive: each is owned by a value here. The algorithm is read, one result is written.
        let answer = unsafe {
            sys::cublasLtMatmulAlgoCheck(
                handle.0,
                self.operation.0,
                self.weights.0,
                self.x.0,
                self.out.0,
                self.out.0,
                &raw const self.algorithm,
                &raw mut found,
            )
        };
        answer.result().map_err(|error| format!("{:?}", error.0))?;
        match found.workspaceSize {
            0..=WORKSPACE => Ok(()),
            bytes => Err(format!("it works in {bytes} bytes")),
        }
    }

    fn set_rows(&mut self, rows: usize) -> Result<(), CudaError> {
        if self.rows != rows {
            self.x.set_columns(rows)?;
            self.out.set_columns(rows)?;
            self.rows = rows;
        }
        Ok(())
    }

    fn proposals(&self, handle: &Handle, most: usize) -> Result<Vec<sys::cublasLtMatmulAlgo_t>, CudaError> {
        let preference = Preference::new()?;
        let mut found = vec![NO_PROPOSAL; most.max(1)];
        let mut count = 0;
        // SAFETY: all handles are alive: each is owned by a value here. At most `found.len()` results are written.
        let answer = unsafe {
            sys::cublasLtMatmulAlgoGetHeuristic(
                handle.0,
                self.operation.0,
                self.weights.0,
                self.x.0,
                self.out.0,
                self.out.0,
                preference.0,
                found.len() as i32,
                found.as_mut_ptr(),
                &raw mut count,
            )
        };
        answer.result().map_err(failed("choosing an algorithm"))?;
        found.truncate(usize::try_from(count).unwrap_or(0));
        found.retain(|result| result.state == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS);
        if found.is_empty() {
            return Err(no_algorithm("cuBLASLt has none for this shape"));
        }
        Ok(found.into_iter().map(|result| result.algo).collect())
    }
}

/// Room for a proposal.
const NO_PROPOSAL: sys::cublasLtMatmulHeuristicResult_t = sys::cublasLtMatmulHeuristicResult_t {
    algo: sys::cublasLtMatmulAlgo_t { data: [0; 8] },
    workspaceSize: 0,
    state: sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED,
    wavesCount: 0.0,
    reserved: [0; 4],
};

/// Declares an owner of a cuBLASLt object that destroys it.
macro_rules! owner {
    ($name:ident, $of:ty, $destroy:path) => {
        struct $name($of);

        // SAFETY: the object belongs to no thread; `&mut` and `&` of the owner say who uses it.
        unsafe impl Send for $name {}

        impl Drop for $name {
            fn drop(&mut self) {
                // SAFETY: made by the library, owned here, destroyed once. What could fail is an object that is none.
                let _ = unsafe { $destroy(self.0) };
            }
        }
    };
}

owner!(Handle, sys::cublasLtHandle_t, lt::destroy_handle);
owner!(Operation, sys::cublasLtMatmulDesc_t, lt::destroy_matmul_desc);
owner!(Layout, LayoutHandle, lt::destroy_matrix_layout);
owner!(Preference, sys::cublasLtMatmulPreference_t, lt::destroy_matmul_pref);

impl Operation {
    fn transposed_times_plain() -> Result<Self, CudaError> {
        let operation = Self(
            lt::create_matmul_desc(
                sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
                sys::cudaDataType::CUDA_R_32F,
            )
            .map_err(failed("describing a product"))?,
        );
        let transposed = 1_i32;
        // SAFETY: the attribute is a 32-bit integer, copied at once; 1 is `CUBLAS_OP_T`.
        unsafe {
            lt::set_matmul_desc_attribute(
                operation.0,
                sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA,
                (&raw const transposed).cast::<c_void>(),
                size_of::<i32>(),
            )
        }
        .map_err(failed("describing a product"))?;
        Ok(operation)
    }
}

impl Layout {
    fn new(ty: sys::cudaDataType, rows: usize, columns: usize) -> Result<Self, CudaError> {
        let layout = lt::create_matrix_layout(ty, rows as u64, columns as u64, rows as i64);
        Ok(Self(layout.map_err(failed("describing a matrix"))?))
    }

    fn set_columns(&mut self, columns: usize) -> Result<(), CudaError> {
        let columns = columns as u64;
        // SAFETY: the attribute is a 64-bit integer, copied at once.
        unsafe {
            lt::set_matrix_layout_attribute(
                self.0,
                sys::cublasLtMatrixLayoutAttribute_t::CUBLASLT_MATRIX_LAYOUT_COLS,
                (&raw const columns).cast::<c_void>(),
                size_of::<u64>(),
            )
        }
        .map_err(failed("describing a matrix"))
    }
}

impl Preference {
    /// The workspace's size, and operands at multiples of 16 bytes.
    fn new() -> Result<Self, CudaError> {
        use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
        let preference = Self(lt::create_matmul_pref().map_err(failed("choosing an algorithm"))?);
        let workspace = WORKSPACE as u64;
        // SAFETY: the attribute is a 64-bit integer, copied at once.
        unsafe {
            lt::set_matmul_pref_attribute(
                preference.0,
                Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                (&raw const workspace).cast::<c_void>(),
                size_of::<u64>(),
            )
        }
        .map_err(failed("choosing an algorithm"))?;
        let alignment = 16_u32;
        for attribute in [
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
        ] {
            // SAFETY: the attribute is a 32-bit integer, copied at once.
            unsafe {
                lt::set_matmul_pref_attribute(
                    preference.0,
                    attribute,
                    (&raw const alignment).cast::<c_void>(),
                    size_of::<u32>(),
                )
            }
            .map_err(failed("choosing an algorithm"))?;
        }
        Ok(preference)
    }
}
