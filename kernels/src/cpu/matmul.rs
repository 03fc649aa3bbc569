//! Matrix products: one pass over the weights serves all rows of activations.
//!
//! **Owns** the split of products over threads and instruction sets. **Never** changes the order of operations of an output: every
//! output is one chain over the units of its panel, front to back. For quantised weights a unit gives
//! `acc += scale * (a.scale * Σ code·a.code + a.zero * Σ code)` with exact integer sums (codes around 128 are centred first; `Q8G16` has two such
//! steps), and then, where there are minima, `acc += min * a.sum`; all fused. For the others a unit is one fused multiply-add. So tile shapes
//! differ, bits do not.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicUsize, Ordering};

use super::activations::Activations;
use super::disjoint::Disjoint;
use super::isa::Isa;
use super::packed::{Matrix, PANEL};
use super::pool::ThreadPool;
use crate::error::{ShapeError, product};

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;

pub(in crate::cpu) use portable::fused;

/// A product to compute: `out[row][i] = Σ weights[i][k] · x[row][k]`.
#[derive(Debug)]
pub struct Product<'a> {
    /// The weights.
    pub weights: Matrix<'a>,
    /// `[rows of x][stride]`, of which the first `weights.rows()` of each row are written. The last row may end after those.
    pub out: &'a mut [f32],
    /// Elements from one output row to the next.
    pub stride: usize,
}

/// One matrix product.
///
/// # Errors
/// Shapes do not fit, or the activations are not set in the form the weights need; nothing has been written.
pub fn matmul(
    pool: &ThreadPool,
    isa: Isa,
    weights: &Matrix<'_>,
    x: &Activations,
    out: &mut [f32],
    stride: usize,
) -> Result<(), ShapeError> {
    matmul_all(pool, isa, x, &mut [Product { weights: *weights, out, stride }])
}

/// Several products of the same activations, with one meeting of the threads.
///
/// # Errors
/// As [`matmul`]; nothing has been written for any of them.
pub fn matmul_all(
    pool: &ThreadPool,
    isa: Isa,
    x: &Activations,
    products: &mut [Product<'_>],
) -> Result<(), ShapeError> {
    products.iter().try_for_each(|product| check(x, product))?;
    if x.rows() == 0 {
        return Ok(());
    }
    let isa = isa.usable();
    let work: Vec<_> = products
        .iter_mut()
        .map(|product| Work {
            weights: product.weights,
            out: Disjoint::new(product.out),
            stride: product.stride,
            run: run_length(&product.weights, pool.threads()),
        })
        .collect();
    let runs: usize = work.iter().map(Work::runs).sum();
    let next = AtomicUsize::new(0);
    pool.run(&|_, _| {
        loop {
            let mut run = next.fetch_add(1, Ordering::Relaxed);
            if run >= runs {
                break;
            }
            for work in &work {
                if run < work.runs() {
                    work.compute(isa, x, run);
                    break;
                }
                run -= work.runs();
            }
        }
    });
    Ok(())
}

/// Panels that a thread takes at a time: few enough that threads end together, enough that the hardware prefetcher gets going.
fn run_length(weights: &Matrix<'_>, threads: usize) -> usize {
    const RUN_BYTES: usize = 128 * 1024;
    let panels = weights.layout().panels();
    (panels / (8 * threads)).clamp(1, RUN_BYTES.div_ceil(weights.layout().panel_bytes()))
}

fn check(x: &Activations, work: &Product<'_>) -> Result<(), ShapeError> {
    let layout = work.weights.layout();
    if x.rows() == 0 {
        return Ok(());
    }
    if x.columns() != layout.columns() {
        return Err(ShapeError::Dimension {
            what: "number of activation columns",
            needed: "that of the weights",
            found: x.columns(),
        });
    }
    if !x.is(layout.ty().activations()) {
        return Err(ShapeError::Activations { weights: layout.ty() });
    }
    if work.stride < layout.rows() {
        return Err(ShapeError::Dimension {
            what: "output stride",
            needed: "at least the rows of the weights",
            found: work.stride,
        });
    }
    let needed = product("output", &[x.rows() - 1, work.stride])?
        .checked_add(layout.rows())
        .ok_or(ShapeError::Overflow { what: "output" })?;
    if work.out.len() < needed {
        return Err(ShapeError::Length { what: "output", needed, found: work.out.len() });
    }
    Ok(())
}

struct Work<'a> {
    weights: Matrix<'a>,
    out: Disjoint<'a, f32>,
    stride: usize,
    /// Panels in a run.
    run: usize,
}

impl Work<'_> {
    fn runs(&self) -> usize {
        self.weights.layout().panels().div_ceil(self.run)
    }

    /// The panels of run `run`; each run must be computed by one thread only.
    fn compute(&self, isa: Isa, x: &Activations, run: usize) {
        let layout = self.weights.layout();
        for index in run * self.run..layout.panels().min((run + 1) * self.run) {
            let first = index * PANEL;
            let width = PANEL.min(layout.rows() - first);
            let store = |row: usize, outputs: &[f32; PANEL]| {
                let at = row * self.stride + first;
                // SAFETY: a panel is computed by one thread, and no other panel or row has these columns of this row (the
                // stride is at least the number of columns, by `check`).
                let out = unsafe { self.out.part(at..at + width) };
                out.copy_from_slice(&outputs[..width]);
            };
            panel(isa, layout.ty(), self.weights.panel(index), x, store);
        }
    }
}

/// The products of one panel with all rows. `isa` is usable, and the shapes fit.
#[cfg(target_arch = "x86_64")]
fn panel(
    isa: Isa,
    ty: super::packed::PackedType,
    bytes: &[u8],
    x: &Activations,
    store: impl FnMut(usize, &[f32; PANEL]),
) {
    match isa {
        Isa::Portable => portable::panel(ty, bytes, x, store),
        // SAFETY: `matmul_all` made `isa` with `Isa::usable`, which found AVX2, FMA and F16C.
        Isa::Avx2 | Isa::AvxVnni => unsafe { avx2::panel(ty, bytes, x, store) },
        // SAFETY: `matmul_all` made `isa` with `Isa::usable`, which found AVX-512 F, BW, DQ, VL and VNNI, and those of AVX2.
        Isa::Avx512Vnni | Isa::Amx => unsafe { avx512::panel(ty, bytes, x, store) },
    }
}

/// The products of one panel with all rows. The shapes fit.
#[cfg(not(target_arch = "x86_64"))]
fn panel(
    _isa: Isa,
    ty: super::packed::PackedType,
    bytes: &[u8],
    x: &Activations,
    store: impl FnMut(usize, &[f32; PANEL]),
) {
    portable::panel(ty, bytes, x, store);
}
