//! Which of the algorithms that cuBLASLt proposes is the fastest here.

use super::{Algorithm, CudaError, Gemm, GemmOutput, GemmShape, check, dimension};
use crate::cuda::buffer::{View, ViewMut};
use crate::cuda::graph::Graph;
use crate::cuda::launch::Half;
use crate::cuda::stream::{Event, Stream};
use crate::error::length;

/// How long the products of one measurement take together, about.
const MEASURED_US: f64 = 1_000.0;
/// How often each is measured; the best counts.
const REPEATS: usize = 4;
/// By how much a later proposal must be faster than an earlier one: less is noise.
const MARGIN: f64 = 0.99;

/// What a shape is tuned with.
#[expect(missing_debug_implementations, reason = "names of device memory say nothing")]
pub struct Tuning<'a, T: Half, O: GemmOutput> {
    /// `[rows][inputs]`: as many rows as the algorithm is for, at most.
    pub x: View<'a, T>,
    /// Matrices `[outputs][inputs]`, one at least, gone through in turn as a model's layers are: a single small one would be measured out of
    /// the cache.
    pub weights: &'a [View<'a, T>],
    /// `[rows][outputs]`: overwritten.
    pub out: ViewMut<'a, O>,
    /// How many proposals are tried.
    pub most: usize,
}

/// What tuning found.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Tuned {
    /// What is kept now.
    pub algorithm: Algorithm,
    /// Its place among the proposals, from 0.
    pub place: usize,
    /// Microseconds of a product with it.
    pub micros: f64,
    /// Microseconds of a product with the first proposal, which is kept without tuning.
    pub first_micros: f64,
}

impl Gemm {
    /// Times the algorithms that cuBLASLt proposes for a shape and the rows of `with`, and keeps the fastest for the bucket that they are in.
    /// The rows of a bucket share it: best tune with its last. Waits; milliseconds for each proposal.
    ///
    /// Times differ from run to run, and so may the choice: keep [`algorithms`](Self::algorithms) where bits must stay the same.
    ///
    /// # Errors
    /// The shapes do not fit, cuBLASLt has no algorithm for them, or the device failed. What was kept before is kept.
    pub fn tune<T: Half, O: GemmOutput>(
        &mut self,
        stream: &Stream,
        shape: GemmShape,
        mut with: Tuning<'_, T, O>,
    ) -> Result<Tuned, CudaError> {
        check(shape)?;
        let rows = with.x.len() / shape.inputs;
        length("product input", rows * shape.inputs, with.x.len())?;
        if rows == 0 || with.weights.is_empty() {
            return Err(dimension("rows and matrices to tune with", "one at least", 0));
        }
        let before =
            self.plans.get(&self.key::<T, O>(shape, rows)).map(|plan| Algorithm(plan.algorithm.data));
        let proposals = self.proposals::<T, O>(shape, rows, with.most)?;
        let tried = self.try_all(stream, shape, rows, &proposals, &mut with);
        let tuned = tried.and_then(|times| {
            let place = fastest(&times).ok_or_else(|| CudaError::Device {
                doing: "tuning a product",
                code: "no proposed algorithm runs".to_owned(),
            })?;
            let (algorithm, micros) = (proposals[place], times[place]);
            Ok(Tuned { algorithm, place, micros, first_micros: times[0] })
        });
        match (&tuned, before) {
            (Ok(tuned), _) => self.keep::<T, O>(shape, rows, tuned.algorithm)?,
            (Err(_), Some(before)) => self.keep::<T, O>(shape, rows, before)?,
            (Err(_), None) => {
                let key = self.key::<T, O>(shape, rows);
                self.plans.remove(&key);
            }
        }
        tuned
    }

    /// Microseconds of a product with each proposal; infinite where it does not run.
    fn try_all<T: Half, O: GemmOutput>(
        &mut self,
        stream: &Stream,
        shape: GemmShape,
        rows: usize,
        proposals: &[Algorithm],
        with: &mut Tuning<'_, T, O>,
    ) -> Result<Vec<f64>, CudaError> {
        let mut launches = 0;
        let mut times = Vec::with_capacity(proposals.len());
        for &algorithm in proposals {
            self.keep::<T, O>(shape, rows, algorithm)?;
            // Loads the kernel, which a recording may not. A proposal that does not run is no failure of the device; the wait shows those.
            let runs = self.multiply(stream, shape, with.x, with.weights[0], &mut with.out);
            stream.synchronize()?;
            if let Err(error @ CudaError::Shape(_)) = runs {
                return Err(error);
            }
            if runs.is_err() {
                times.push(f64::INFINITY);
                continue;
            }
            if launches == 0 {
                let one = self.time(stream, shape, 2, with)?;
                launches = ((MEASURED_US / one) as usize).clamp(2, 64);
            }
            times.push(self.time(stream, shape, launches, with)?);
        }
        Ok(times)
    }

    /// Microseconds of one of `launches` products that run in a row.
    fn time<T: Half, O: GemmOutput>(
        &mut self,
        stream: &Stream,
        shape: GemmShape,
        launches: usize,
        with: &mut Tuning<'_, T, O>,
    ) -> Result<f64, CudaError> {
        let (start, end) = (Event::new(stream.device())?, Event::new(stream.device())?);
        // A recording: small products take less than a launch does.
        let recorded = Graph::capture(stream, |stream| {
            for weights in with.weights.iter().cycle().take(launches) {
                self.multiply(stream, shape, with.x, *weights, &mut with.out)?;
            }
            Ok(())
        })?;
        let mut best = f64::INFINITY;
        for _ in 0..REPEATS {
            start.record(stream)?;
            recorded.replay()?;
            end.record(stream)?;
            best = best.min(start.micros_until(&end)? / launches as f64);
        }
        Ok(best)
    }
}

/// The first of the fastest; `None` where none is finite.
fn fastest(times: &[f64]) -> Option<usize> {
    let mut best: Option<(usize, f64)> = None;
    for (place, &time) in times.iter().enumerate().filter(|(_, time)| time.is_finite()) {
        if best.is_none_or(|(_, least)| time < MARGIN * least) {
            best = Some((place, time));
        }
    }
    best.map(|(place, _)| place)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_later_proposal_wins_only_where_it_is_faster_by_more_than_noise() {
        let inf = f64::INFINITY;
        assert_eq!(fastest(&[10.0, 9.95, 8.0, 7.99]), Some(2));
        assert_eq!(fastest(&[10.0, 9.95]), Some(0));
        assert_eq!(fastest(&[inf, 12.0, f64::NAN]), Some(1));
        assert_eq!(fastest(&[inf, inf]), None);
        assert_eq!(fastest(&[]), None);
    }
}
