//! Matrix products: one pass over the weights serves all rows of activations.
//!
//! **Owns** the split of products over threads and instruction sets. **Never** changes the order of operations of an output: every
//! output is one chain over the units of its panel, front to back. For quantised weights a unit gives
//! `acc += scale * (a.scale * Σ code·a.code + a.zero * Σ code)` with exact integer sums (codes around 128 are centred first; `Q8G16` has two such
//! steps), and then, where there are minima, `acc += min * a.sum`; all fused. For the others a unit is one fused multiply-add. So tile shapes
//! differ, bits do not.
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::activations::Activations;
use super::disjoint::Disjoint;
use super::isa::Isa;
use super::packed::{Matrix, PANEL};
use super::pool::ThreadPool;
use crate::error::{ShapeError, product};

#[cfg(target_arch = "x86_64")]
mod amx;
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
        })
        .collect();
    let next = AtomicUsize::new(0);
    pool.run(&|_, threads| {
        while let Some((work, panels)) = take(&work, &next, threads) {
            work.compute(isa, x, panels);
        }
    });
    Ok(())
}

/// The next panels for a thread; `next` counts those of all products.
///
/// The first runs are long, so that the hardware prefetcher gets going, and they become shorter and shorter, so that threads end together.
fn take<'w, 'a>(
    work: &'w [Work<'a>],
    next: &AtomicUsize,
    threads: usize,
) -> Option<(&'w Work<'a>, Range<usize>)> {
    let all: usize = work.iter().map(Work::panels).sum();
    let mut taken = next.load(Ordering::Relaxed);
    loop {
        let mut first = taken;
        let work = work.iter().find(|work| {
            let here = first < work.panels();
            first -= if here { 0 } else { work.panels() };
            here
        })?;
        let run = ((all - taken) / (2 * threads)).clamp(1, work.panels() - first);
        match next.compare_exchange_weak(taken, taken + run, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => return Some((work, first..first + run)),
            Err(now) => taken = now,
        }
    }
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
}

impl Work<'_> {
    fn panels(&self) -> usize {
        self.weights.layout().panels()
    }

    /// Computes `panels`; each panel must be computed by one thread only.
    fn compute(&self, isa: Isa, x: &Activations, panels: Range<usize>) {
        let mut run = Run { weights: self.weights, panels, out: &self.out, stride: self.stride };
        match isa {
            Isa::Portable => portable::panels(&mut run, x),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => {
                // SAFETY: `matmul_all` made `isa` with `Isa::usable`, which found AVX2, FMA and F16C.
                unsafe { avx2::plain::panels(&mut run, x) };
            }
            #[cfg(target_arch = "x86_64")]
            Isa::AvxVnni => {
                // SAFETY: `matmul_all` made `isa` with `Isa::usable`, which found AVX-VNNI, and those of AVX2.
                unsafe { avx2::vnni::panels(&mut run, x) };
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Amx if amx::suits(self.weights.layout().ty(), x) => {
                // SAFETY: `matmul_all` made `isa` with `Isa::usable`, which found AMX, the kernel's leave to use it, and all that comes with it.
                unsafe { amx::panels(&mut run, x) };
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni | Isa::Amx => {
                // SAFETY: `matmul_all` made `isa` with `Isa::usable`, which found AVX-512 F, BW, DQ, VL and VNNI, and those of AVX2.
                unsafe { avx512::panels(&mut run, x) };
            }
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Avx2 | Isa::AvxVnni | Isa::Avx512Vnni | Isa::Amx => portable::panels(&mut run, x),
        }
    }
}

/// Panels of a product that this thread computes.
///
/// Having one tells you that no other thread reads or writes these panels' outputs.
struct Run<'a> {
    weights: Matrix<'a>,
    panels: Range<usize>,
    out: &'a Disjoint<'a, f32>,
    stride: usize,
}

impl Run<'_> {
    /// The outputs of a panel of the run and a row: [`PANEL`], or what there is of the last panel.
    fn outputs(&mut self, panel: usize, row: usize) -> &mut [f32] {
        let first = panel * PANEL;
        let width = PANEL.min(self.weights.layout().rows() - first);
        let at = row * self.stride + first;
        // SAFETY: this thread alone has the panel, no other panel or row has these columns of this row (the stride is at least the number of
        // columns, by `check`), and the run is borrowed as long as the part.
        unsafe { self.out.part(at..at + width) }
    }

    /// Sets the outputs of a panel and a row.
    fn keep(&mut self, panel: usize, row: usize, outputs: &[f32; PANEL]) {
        let out = self.outputs(panel, row);
        match <&mut [f32; PANEL]>::try_from(&mut *out) {
            Ok(out) => *out = *outputs,
            Err(_) => out.copy_from_slice(&outputs[..out.len()]),
        }
    }
}
