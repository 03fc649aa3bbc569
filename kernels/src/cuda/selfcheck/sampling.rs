//! Draws and log-probabilities, against the CPU's sampler.

use pagedd_core::{Penalties, SamplingParams, TokenId};

use super::{Bench, Extent, Found, word, worst};
use crate::cuda::{Buffer, CudaError, Ranked, SampleRow, Sampler};
use crate::sample::{Adjustment, SampleError, adjust, draw_above};

/// Log-probabilities that a row may ask for here.
const RANKS: usize = 20;

pub(super) fn check(bench: &mut Bench, extent: Extent) -> Result<(), CudaError> {
    let (vocabularies, shapes): (&[usize], &[Shape]) = match extent {
        Extent::Full => (
            &[4, 1000, 32_000, 49_152, 128_256, 152_064],
            &[Shape::Normal, Shape::Peaked, Shape::Flat, Shape::Equal, Shape::Wide, Shape::Steps],
        ),
        Extent::Minimal => (&[1000, 9000], &[Shape::Normal, Shape::Equal]),
    };
    for &vocabulary in vocabularies {
        for &shape in shapes {
            draws(bench, vocabulary, shape)?;
        }
    }
    failures(bench)
}

/// What the logits of a row look like.
#[derive(Clone, Copy, Debug)]
enum Shape {
    /// A bell, as most layers give it.
    Normal,
    /// A few far above the rest.
    Peaked,
    /// Hardly any difference.
    Flat,
    /// None at all.
    Equal,
    /// Over hundreds of units, most of them far from the best.
    Wide,
    /// A bell in steps of a quarter: every value many times.
    Steps,
}

fn logits(shape: Shape, seed: u32, count: usize) -> Vec<f32> {
    let unit = |index: usize| word(seed, index) as f32 / (1_u64 << 32) as f32;
    let bell = |index: usize| (0..4).map(|i| unit(4 * index + i) - 0.5).sum::<f32>() * 5.0;
    let value = |index: usize| match shape {
        Shape::Normal => bell(index),
        Shape::Peaked if index % 1009 == 7 => 12.0 + bell(index),
        Shape::Peaked => bell(index) - 25.0,
        Shape::Flat => bell(index) * 1e-3,
        Shape::Equal => -3.25,
        Shape::Wide => unit(index) * 300.0 - 200.0,
        Shape::Steps => (bell(index) * 4.0).round() / 4.0,
    };
    (0..count).map(value).collect()
}

/// Ways to draw: temperature, `top_p`, `top_k`, `min_p`.
const WAYS: [(f32, f32, Option<u32>, f32); 16] = [
    (0.0, 1.0, None, 0.0),
    (1.0, 1.0, Some(1), 0.0),
    (1.0, 1.0, None, 0.0),
    (0.7, 1.0, None, 0.05),
    (1.0, 0.95, None, 0.0),
    (0.6, 0.9, Some(40), 0.0),
    (1.0, 1.0, Some(50), 0.0),
    (1.3, 0.999, Some(5000), 0.0),
    (3.0, 0.9, None, 0.0),
    (3.0, 0.5, Some(20_000), 0.0),
    (0.05, 0.8, None, 0.0),
    (100.0, 0.7, None, 0.0),
    (1.0, 1e-4, None, 0.0),
    (1.0, 0.9, None, 0.3),
    (0.01, 0.999_999, Some(3), 0.0),
    (2.0, 0.99, Some(200_000), 1e-6),
];

/// Every way for several seeds, with and without penalties; all rows at once, then a few alone: other cuts, the same draws.
fn draws(bench: &mut Bench, vocabulary: usize, shape: Shape) -> Result<(), CudaError> {
    let count = 2 * WAYS.len();
    let all: Vec<f32> = (0..count).flat_map(|row| logits(shape, row as u32 % 5, vocabulary)).collect();
    let changes = adjustments(vocabulary);
    let rows: Vec<SampleRow<'_>> = (0..count).map(|row| sample_row(row, &changes)).collect();

    let mut sampler = Sampler::new(&bench.stream, vocabulary, count, RANKS, count * changes.len())?;
    let mut on_device = bench.copy(&all)?;
    let run = |bench: &mut Bench, sampler: &mut Sampler, rows: &[SampleRow<'_>], logits: &mut Buffer<f32>| {
        sampler.set(&bench.stream, &mut bench.ring, rows)?;
        sampler.run(&bench.stream, &mut logits.all_mut())?;
        let drawn = sampler.drawn().part(0..rows.len())?.to_vec(&bench.stream)?;
        Ok::<_, CudaError>(drawn.into_iter().map(|d| d.token().map_or(u32::MAX, |t| t.0)).collect::<Vec<_>>())
    };
    let drawn = run(bench, &mut sampler, &rows, &mut on_device)?;
    let (logprobs, ranked) =
        (sampler.logprobs().to_vec(&bench.stream)?, sampler.ranked().to_vec(&bench.stream)?);
    let left = on_device.all().to_vec(&bench.stream)?;

    let name = format!("{shape:?}, vocabulary {vocabulary}");
    let row_logits = |row: &SampleRow<'_>| &all[row.logits_row as usize * vocabulary..][..vocabulary];
    let mut different = 0;
    for (row, got) in rows.iter().zip(&drawn) {
        let mut logits = row_logits(row).to_vec();
        let adjusted = adjust(&mut logits, row.params.penalties, row.adjustments);
        let want =
            adjusted.and_then(|()| draw_above(&logits, &row.params, row.min_p, row.choice, row.position));
        different += usize::from(want != Ok(TokenId(*got)));
    }
    bench.report("draw", name.clone(), Found::Different { count: different, of: count });
    let changed = left.iter().zip(&all).filter(|(left, before)| left.to_bits() != before.to_bits()).count();
    bench.report("logits restored", name.clone(), Found::Different { count: changed, of: all.len() });

    let mut different = 0;
    for first in [0, 5, 17, 30] {
        let alone = run(bench, &mut sampler, &rows[first..=first], &mut on_device)?;
        different += usize::from(alone[0] != drawn[first]);
    }
    bench.report("draw alone", name.clone(), Found::Different { count: different, of: 4 });

    let (mut error, mut misplaced, mut places) = (0.0, 0, 0);
    for (index, row) in rows.iter().enumerate() {
        let Some(ranks) = row.params.logprobs.map(|n| usize::from(n).min(vocabulary)) else { continue };
        let ranked = &ranked[index * RANKS..][..ranks];
        let (off, wrong) = ranking(row_logits(row), ranked, drawn[index], logprobs[index]);
        error = super::layers::larger(error, off);
        misplaced += wrong;
        places += ranks;
    }
    bench.report("log-softmax", name.clone(), Found::Error(error));
    bench.report("ranks", name, Found::Different { count: misplaced, of: places });
    Ok(())
}

/// The error of a row's log-probabilities, and how many of its ranks hold another token than they must.
fn ranking(logits: &[f32], ranked: &[Ranked], token: u32, logprob: f32) -> (f64, usize) {
    let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mass: f64 = logits.iter().map(|&x| (f64::from(x) - f64::from(top)).exp()).sum();
    let exact = |token: u32| {
        let want = f64::from(logits[token as usize]) - f64::from(top) - mass.ln();
        (want, want.abs() * 1e-7 + 1e-6)
    };
    let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
    let order = |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
    if !ranked.is_empty() && ranked.len() < ids.len() {
        ids.select_nth_unstable_by(ranked.len() - 1, order);
    }
    ids.truncate(ranked.len());
    ids.sort_unstable_by(order);
    let wrong = ranked.iter().zip(&ids).filter(|(got, want)| got.token != **want).count();
    let got: Vec<f32> = ranked.iter().map(|r| r.logprob).chain([logprob]).collect();
    let want = ids.iter().copied().chain([token]).map(exact);
    (worst(&got, f64::from, want), wrong)
}

fn sample_row(row: usize, changes: &[Adjustment]) -> SampleRow<'_> {
    let (temperature, top_p, top_k, min_p) = WAYS[row % WAYS.len()];
    // Of the second half, some count and some rank.
    let adjusted = row >= WAYS.len() && !row.is_multiple_of(3);
    let logprobs = (row % 5 < 3).then(|| [0, 5, RANKS as u8][row % 3]);
    let seed = u64::from(word(40, row)) << 32 | u64::from(word(41, row));
    let penalties =
        if adjusted { Penalties { repetition: 1.2, frequency: 0.3, presence: 0.7 } } else { Penalties::NONE };
    SampleRow {
        logits_row: row as u32,
        params: SamplingParams { temperature, top_p, top_k, seed, logprobs, penalties },
        min_p,
        choice: row as u32 % 3,
        position: 100 + 7 * row as u32,
        adjustments: if adjusted { changes } else { &[] },
    }
}

fn adjustments(vocabulary: usize) -> Vec<Adjustment> {
    let count = (vocabulary / 2).min(700);
    (0..count)
        .map(|i| Adjustment {
            token: TokenId((i * (vocabulary / count)) as u32),
            seen: i % 3 != 0,
            output: if i % 3 == 1 { i as u32 % 4 } else { 0 },
            bias: if i % 7 == 0 { 1.5 - (i % 5) as f32 } else { 0.0 },
        })
        .collect()
}

/// A row that is not finite fails alone, and says where.
fn failures(bench: &mut Bench) -> Result<(), CudaError> {
    let (vocabulary, count) = (32_000, 4);
    let mut all: Vec<f32> = (0..count).flat_map(|row| logits(Shape::Normal, row, vocabulary)).collect();
    all[vocabulary + 20_001] = f32::NAN;
    all[vocabulary + 31_999] = f32::INFINITY;
    all[3 * vocabulary] = f32::NEG_INFINITY;
    let rows: Vec<SampleRow<'_>> =
        (0..count as usize).map(|row| SampleRow { logits_row: row as u32, ..sample_row(2, &[]) }).collect();
    let mut sampler = Sampler::new(&bench.stream, vocabulary, rows.len(), RANKS, 0)?;
    sampler.set(&bench.stream, &mut bench.ring, &rows)?;
    let mut on_device = bench.copy(&all)?;
    sampler.run(&bench.stream, &mut on_device.all_mut())?;
    let drawn = sampler.drawn().to_vec(&bench.stream)?;
    let different = rows.iter().zip(&drawn).enumerate().filter(|&(index, (row, got))| {
        let logits = &all[index * vocabulary..][..vocabulary];
        let want: Result<TokenId, SampleError> =
            draw_above(logits, &row.params, row.min_p, row.choice, row.position);
        got.token() != want
    });
    let count = different.count();
    bench.report("draw", "rows that are not finite".to_owned(), Found::Different { count, of: rows.len() });
    Ok(())
}
