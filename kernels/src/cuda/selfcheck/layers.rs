//! Norm, rotary embedding with KV write, activation, embedding, block copies, uploads, filling.
#![allow(unsafe_code)]

use pagedd_core::BlockId;

use super::{Bench, Extent, Found, allowance, floats, halves, word, worst};
use crate::Pairing;
use crate::cpu::kv::KvRow;
use crate::cuda::{
    AddNorm, BlockCopies, Buffer, CudaError, DeviceAngles, DeviceBatch, DeviceKvLayout, Drawn, Embed, Half,
    Indices, RopeIntoKv, TokenSource, Tokens, add_rms_norm, copy_blocks, embed, fill_normal, rope_into_kv,
    silu_mul,
};
use crate::e4m3::{DeviceKvElement, e4m3_value, quantize_e4m3};
use crate::sample::philox4x32_10;

pub(super) fn check<T: Half>(bench: &mut Bench, extent: Extent) -> Result<(), CudaError> {
    if extent == Extent::Minimal {
        norm::<T>(bench, 5, 576, true, true)?;
        norm::<T>(bench, 2, 8192, true, false)?;
        for pairing in [Pairing::Halves, Pairing::Interleaved] {
            for element in ELEMENTS {
                let (head_dim, block_size, seed) = (64, 16, 102);
                let case = RopeCase { heads: 2, kv_heads: 1, head_dim, block_size, pairing, element, seed };
                rope::<T>(bench, &case)?;
            }
        }
        silu::<T>(bench, 2, 1536)?;
        embedding::<T>(bench, 576)?;
        uploads(bench, &[300, 1, 64])?;
        return ELEMENTS.iter().try_for_each(|&element| copies::<T>(bench, element, false));
    }
    for (rows, hidden) in [(1, 576), (5, 64), (3, 3584), (7, 4096), (2, 8192), (2, 32_768)] {
        norm::<T>(bench, rows, hidden, true, false)?;
        norm::<T>(bench, rows, hidden, false, false)?;
        norm::<T>(bench, rows, hidden, true, true)?;
    }
    let mut seed = 100;
    for (heads, kv_heads, head_dim) in [(9, 3, 64), (4, 4, 80), (6, 2, 96), (32, 8, 128), (2, 1, 256)] {
        for block_size in [16, 64, 512] {
            for pairing in [Pairing::Halves, Pairing::Interleaved] {
                seed += 1;
                for element in ELEMENTS {
                    let case = RopeCase { heads, kv_heads, head_dim, block_size, pairing, element, seed };
                    rope::<T>(bench, &case)?;
                }
            }
        }
    }
    for (rows, ffn) in [(1, 1536), (5, 14_336), (3, 11_008), (130, 18_944)] {
        silu::<T>(bench, rows, ffn)?;
    }
    for hidden in [576, 4096] {
        embedding::<T>(bench, hidden)?;
    }
    for element in ELEMENTS {
        copies::<T>(bench, element, false)?;
        copies::<T>(bench, element, true)?;
    }
    uploads(bench, &[1, 2, 3, 4, 5, 0, 255, 256, 257, 70_000, 7, 8, 9, 10])?;
    uploads(bench, &[200_000, 100, 262_144, 31])?;
    filling::<T>(bench)
}

fn norm<T: Half>(
    bench: &mut Bench,
    rows: usize,
    hidden: usize,
    with_delta: bool,
    picked: bool,
) -> Result<(), CudaError> {
    let (x, delta) = (floats(1, rows * hidden), halves::<T>(2, rows * hidden));
    let weight: Vec<f32> = floats(3, hidden).iter().map(|w| 1.0 + 0.1 * w).collect();
    let picks: Vec<u32> = (0..rows as u32).rev().step_by(if picked { 2 } else { 1 }).collect();
    let mut indices = Indices::with_capacity(&bench.stream, rows)?;
    indices.set(&bench.stream, &mut bench.ring, &picks, rows)?;
    let count = if picked { picks.len() } else { rows };
    let (mut on_device, summand) = (bench.copy(&x)?, bench.copy(&delta)?);
    let mut out = bench.poisoned::<T>(count * hidden)?;
    let factors = bench.copy(&weight)?;
    let epsilon = 1e-5;
    let args = AddNorm {
        x: on_device.all_mut(),
        delta: with_delta.then(|| summand.all()),
        weight: factors.all(),
        epsilon,
        rows: picked.then_some(&indices),
        out: out.all_mut(),
    };
    add_rms_norm(&bench.stream, args)?;

    let sum = |i: usize| {
        // As the kernel rounds it.
        if with_delta { x[i] + delta[i].to_f64() as f32 } else { x[i] }
    };
    let mut want = Vec::with_capacity(count * hidden);
    for out_row in 0..count {
        let row = if picked { picks[out_row] as usize } else { out_row };
        let values: Vec<f64> = (0..hidden).map(|i| f64::from(sum(row * hidden + i))).collect();
        let mean = values.iter().map(|v| v * v).sum::<f64>() / hidden as f64;
        let scale = 1.0 / (mean + f64::from(epsilon)).sqrt();
        want.extend(values.iter().zip(&weight).map(|(v, w)| v * scale * f64::from(*w)));
    }
    let got = out.all().to_vec(&bench.stream)?;
    let error = worst(&got, T::to_f64, want.iter().map(|&w| (w, allowance::<T>(w, w.abs(), 4e-6))));
    let case = format!("{} {rows}x{hidden} delta {with_delta} rows picked {picked}", T::NAME);
    bench.report("add_rms_norm", case.clone(), Found::Error(error));
    let left = on_device.all().to_vec(&bench.stream)?;
    let stays = |i: usize| if picked { x[i] } else { sum(i) };
    let count = left.iter().enumerate().filter(|&(i, x)| x.to_bits() != stays(i).to_bits()).count();
    bench.report("residual", case, Found::Different { count, of: left.len() });
    Ok(())
}

struct RopeCase {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    block_size: usize,
    pairing: Pairing,
    element: DeviceKvElement,
    seed: u32,
}

const ELEMENTS: [DeviceKvElement; 2] = [DeviceKvElement::Half, DeviceKvElement::E4m3];

/// Every byte of an arena that no kernel wrote.
const UNTOUCHED: u8 = 0xa5;

fn rope<T: Half>(bench: &mut Bench, case: &RopeCase) -> Result<(), CudaError> {
    let &RopeCase { heads, kv_heads, head_dim: d, block_size, pairing, element, seed } = case;
    let (layers, capacity, layer) = (2, 7, seed as usize % 2);
    let layout = if seed.is_multiple_of(3) {
        DeviceKvLayout::layers_outermost(layers, kv_heads, d, block_size, element, capacity)?
    } else {
        DeviceKvLayout::blocks_outermost(layers, kv_heads, d, block_size, element)?
    };
    // A prompt over a border of blocks; a token far behind, whose table names one block again and again; then padding.
    let prompt = [BlockId(5), BlockId(1), BlockId(0)];
    let far = 40_000;
    let mut long = vec![BlockId(3); far / block_size + 1];
    long[far / block_size] = BlockId(6);
    let rows = [
        KvRow { first_position: block_size as u32 - 3, tokens: 9, table: &prompt },
        KvRow { first_position: far as u32, tokens: 1, table: &long },
    ];
    let (tokens, real) = (12, 10);
    let mut batch = DeviceBatch::with_capacity(&bench.stream, layout, capacity, (16, 4, 4096))?;
    batch.set(&bench.stream, &mut bench.ring, &rows, tokens)?;
    let frequencies: Vec<f32> = (0..d / 2).map(|i| 500_000_f32.powf(-((2 * i) as f32) / d as f32)).collect();
    let magnitude = 1.1;
    let mut angles = DeviceAngles::new(&bench.stream, &frequencies, magnitude, 16)?;
    angles.set(&bench.stream, &batch)?;
    let width = (heads + 2 * kv_heads) * d;
    let mut input = halves::<T>(seed, tokens * width);
    // A token of zeros.
    input[2 * width..3 * width].fill(T::from_f64(0.0));
    let bias = seed.is_multiple_of(2).then(|| floats(seed + 1000, width));
    let on_device = bias.as_ref().map(|bias| bench.copy(bias)).transpose()?;
    let mut qkv = bench.copy(&input)?;
    let mut arena = bench.copy(&vec![UNTOUCHED; layout.arena_bytes(capacity)?])?;
    let args = RopeIntoKv {
        qkv: qkv.all_mut(),
        heads,
        bias: on_device.as_ref().map(|bias| bias.all()),
        angles: &angles,
        pairing,
        batch: &batch,
        layer,
        arena: arena.all_mut(),
    };
    rope_into_kv(&bench.stream, args)?;

    let twin = |token: usize, position: usize, head: usize| -> Vec<(f64, f64)> {
        let at = |i: usize| {
            let index = head * d + i;
            input[token * width + index].to_f64() + bias.as_ref().map_or(0.0, |bias| f64::from(bias[index]))
        };
        let mut out: Vec<f64> = (0..d).map(at).collect();
        let scales: Vec<f64> = out.clone();
        let mut scale = vec![0.0; d];
        for pair in 0..d / 2 {
            let (i, j) = match pairing {
                Pairing::Halves => (pair, pair + d / 2),
                Pairing::Interleaved => (2 * pair, 2 * pair + 1),
            };
            (scale[i], scale[j]) = (scales[i].abs() + scales[j].abs(), scales[i].abs() + scales[j].abs());
            if head < heads + kv_heads {
                let (sin, cos) = f64::from(position as f32 * frequencies[pair]).sin_cos();
                let m = f64::from(magnitude);
                let (a, b) = (out[i], out[j]);
                (out[i], out[j]) = (m * (a * cos - b * sin), m * (a * sin + b * cos));
            }
        }
        out.into_iter().zip(scale).map(|(w, s)| (w, allowance::<T>(w, s, 2e-6))).collect()
    };
    let positions: Vec<usize> = (0..9).map(|i| block_size - 3 + i).chain([far]).chain([0; 2]).collect();
    let q = qkv.all().to_vec(&bench.stream)?;
    let mut error = 0.0_f64;
    for token in 0..tokens {
        for head in 0..heads {
            let got = &q[token * width + head * d..][..d];
            error = larger(error, worst(got, T::to_f64, twin(token, positions[token], head).into_iter()));
        }
    }
    let bytes = arena.all().to_vec(&bench.stream)?;
    let mut written = vec![false; bytes.len()];
    let mut different = 0;
    for token in 0..real {
        let (position, table) = (positions[token], if token < 9 { &prompt[..] } else { &long });
        let block = table[position / block_size].0;
        for head in 0..2 * kv_heads {
            let slot = (block, layer, head / kv_heads, head % kv_heads, position % block_size);
            let at = layout.offset(slot.0, slot.1, slot.2, slot.3, slot.4);
            let row = &bytes[at..at + d * element.bytes()];
            written[at..at + row.len()].fill(true);
            let want = twin(token, position, heads + head);
            error = larger(
                error,
                match element {
                    DeviceKvElement::Half => {
                        let bits = row.as_chunks::<2>().0.iter();
                        let got: Vec<T> = bits.map(|&b| T::of_bits(u16::from_le_bytes(b))).collect();
                        worst(&got, T::to_f64, want.into_iter())
                    }
                    DeviceKvElement::E4m3 => {
                        let at = layout.scale_offset(slot.0, slot.1, slot.2, slot.3, slot.4);
                        written[at..at + 4].fill(true);
                        let scale = bytes[at..].first_chunk().map_or(f32::NAN, |&b| f32::from_le_bytes(b));
                        if head >= kv_heads {
                            let exact = |i: usize| {
                                let index = (heads + head) * d + i;
                                let x = input[token * width + index].to_f64() as f32;
                                x + bias.as_ref().map_or(0.0, |bias| bias[index])
                            };
                            let (want, elements) = quantize_e4m3(&(0..d).map(exact).collect::<Vec<f32>>());
                            let same = want.to_bits() == scale.to_bits() && elements == row;
                            different += usize::from(!same);
                        }
                        e4m3_error(row, scale, &want)
                    }
                },
            );
        }
    }
    let name = format!(
        "{}{} {heads}/{kv_heads} heads of {d}, blocks of {block_size}, {pairing:?}, bias {}",
        T::NAME,
        if element == DeviceKvElement::E4m3 { " to e4m3" } else { "" },
        bias.is_some()
    );
    bench.report("rope_into_kv", name.clone(), Found::Error(error));
    if element == DeviceKvElement::E4m3 {
        let of = real * kv_heads;
        bench.report("values' bits", name.clone(), Found::Different { count: different, of });
    }
    let stray = bytes.iter().zip(&written).filter(|&(&byte, &written)| !written && byte != UNTOUCHED).count();
    bench.report("rest of arena", name, Found::Different { count: stray, of: bytes.len() });
    Ok(())
}

/// The error of a row in e4m3, whose values and what is allowed of them in single precision are `want`: half a step of an element, and of the smallest.
fn e4m3_error(row: &[u8], scale: f32, want: &[(f64, f64)]) -> f64 {
    let largest = want.iter().map(|(w, _)| w.abs()).fold(0.0, f64::max);
    let got: Vec<f64> = row.iter().map(|&bits| f64::from(e4m3_value(bits)) * f64::from(scale)).collect();
    let want = want.iter().map(|&(w, _)| (w, 1.001 * (w.abs() / 16.0 + largest / 448.0 / 1024.0) + 1e-5));
    worst(&got, |x| x, want)
}

/// The larger error; NaN where one is.
pub(super) fn larger(a: f64, b: f64) -> f64 {
    if a.is_nan() || b.is_nan() { f64::NAN } else { a.max(b) }
}

fn silu<T: Half>(bench: &mut Bench, rows: usize, ffn: usize) -> Result<(), CudaError> {
    let input = halves::<T>(7, rows * 2 * ffn);
    let gate_up = bench.copy(&input)?;
    let mut out = bench.poisoned::<T>(rows * ffn)?;
    silu_mul(&bench.stream, gate_up.all(), ffn, &mut out.all_mut())?;
    let want = (0..rows * ffn).map(|i| {
        let at = i / ffn * 2 * ffn + i % ffn;
        let (gate, up) = (input[at].to_f64(), input[at + ffn].to_f64());
        let want = gate / (1.0 + (-gate).exp()) * up;
        (want, allowance::<T>(want, want.abs(), 1e-5))
    });
    let error = worst(&out.all().to_vec(&bench.stream)?, T::to_f64, want);
    bench.report("silu_mul", format!("{} {rows}x{ffn}", T::NAME), Found::Error(error));
    Ok(())
}

fn embedding<T: Half>(bench: &mut Bench, hidden: usize) -> Result<(), CudaError> {
    let vocabulary = 1000;
    let input = halves::<T>(8, vocabulary * hidden);
    let table = bench.copy(&input)?;
    // Draws: two words each, the second of no meaning here.
    let drawn = bench.copy(&[Drawn::of(17), Drawn::of(999), Drawn::of(u32::MAX)])?;
    let sources = [
        (TokenSource::Known(3), Some(3)),
        (TokenSource::Drawn(1), Some(999)),
        (TokenSource::Known(999), Some(999)),
        (TokenSource::Drawn(0), Some(17)),
        (TokenSource::Drawn(2), None),
        (TokenSource::Drawn(3), None),
        (TokenSource::Known(1000), None),
    ];
    let mut tokens = Tokens::with_capacity(&bench.stream, 16)?;
    tokens.set(&bench.stream, &mut bench.ring, &sources.map(|(source, _)| source))?;
    let mut out = bench.poisoned::<f32>(sources.len() * hidden)?;
    let args =
        Embed { table: table.all(), hidden, tokens: &tokens, drawn: Some(drawn.all()), out: out.all_mut() };
    embed(&bench.stream, args)?;
    let got = out.all().to_vec(&bench.stream)?;
    let want = |i: usize| match sources[i / hidden].1 {
        Some(token) => input[token * hidden + i % hidden].to_f64() as f32,
        None => 0.0,
    };
    let count = got.iter().enumerate().filter(|&(i, x)| x.to_bits() != want(i).to_bits()).count();
    bench.report(
        "embed",
        format!("{} {}x{hidden}", T::NAME, sources.len()),
        Found::Different { count, of: got.len() },
    );
    Ok(())
}

fn copies<T: Half>(bench: &mut Bench, element: DeviceKvElement, by_layer: bool) -> Result<(), CudaError> {
    let (layers, kv_heads, d, block_size, capacity) = (3, 2, 80, 32, 6);
    let layout = if by_layer {
        DeviceKvLayout::layers_outermost(layers, kv_heads, d, block_size, element, capacity)?
    } else {
        DeviceKvLayout::blocks_outermost(layers, kv_heads, d, block_size, element)?
    };
    let before: Vec<u8> = (0..layout.arena_bytes(capacity)?).map(|i| (word(9, i) >> 9) as u8).collect();
    let mut arena = bench.copy(&before)?;
    let list =
        [(BlockId(0), BlockId(4), block_size), (BlockId(5), BlockId(2), 7), (BlockId(1), BlockId(3), 0)];
    let mut copies = BlockCopies::with_capacity(&bench.stream, layout, capacity, 8)?;
    copies.set(&bench.stream, &mut bench.ring, &list)?;
    copy_blocks(&bench.stream, &copies, &mut arena.all_mut())?;
    let mut want = before.clone();
    for (from, to, tokens) in list {
        for layer in 0..layers {
            for head in 0..2 * kv_heads {
                let slot = |block: BlockId| (block.0, layer, head / kv_heads, head % kv_heads, 0);
                let at = |block| {
                    let slot = slot(block);
                    layout.offset(slot.0, slot.1, slot.2, slot.3, slot.4)
                };
                let source = &before[at(from)..][..tokens * d * element.bytes()];
                want[at(to)..][..source.len()].copy_from_slice(source);
                let at = |block| {
                    let slot = slot(block);
                    layout.scale_offset(slot.0, slot.1, slot.2, slot.3, slot.4)
                };
                let source = &before[at(from)..][..tokens * element.scale_bytes()];
                want[at(to)..][..source.len()].copy_from_slice(source);
            }
        }
    }
    let got = arena.all().to_vec(&bench.stream)?;
    let count = got.iter().zip(&want).filter(|(got, want)| got != want).count();
    let order = if by_layer { "layers" } else { "blocks" };
    bench.report(
        "copy_blocks",
        format!("{} {order} outermost, {element:?}", T::NAME),
        Found::Different { count, of: got.len() },
    );
    Ok(())
}

/// Uploads of so many words that go together, and such as do not fit beside the others.
fn uploads(bench: &mut Bench, words: &[usize]) -> Result<(), CudaError> {
    let data: Vec<Vec<u32>> =
        words.iter().zip(20..).map(|(&count, seed)| (0..count).map(|i| word(seed, i)).collect()).collect();
    let mut places = Vec::new();
    for &count in words {
        places.push(Buffer::<u32>::zeroed(&bench.stream, count + 1)?);
    }
    // SAFETY: the buffers live until the end, and are read behind `flush`.
    unsafe { bench.ring.hold() }?;
    for (data, place) in data.iter().zip(&mut places) {
        bench.ring.upload(&bench.stream, data, place.part_mut(0..data.len())?)?;
    }
    bench.ring.flush(&bench.stream)?;
    let (mut count, mut of) = (0, 0);
    for (data, place) in data.iter().zip(&places) {
        let got = place.all().to_vec(&bench.stream)?;
        // One element more than was uploaded: it stays as it was.
        count += got.iter().zip(data.iter().chain(&[0])).filter(|(got, want)| got != want).count();
        of += got.len();
    }
    bench.report("scatter", format!("{} pieces", words.len()), Found::Different { count, of });
    Ok(())
}

fn filling<T: Half>(bench: &mut Bench) -> Result<(), CudaError> {
    let (count, seed, deviation) = (1 << 18, 0x1234_5678_9abc_def0_u64, 0.02_f32);
    let mut out = bench.poisoned::<T>(count)?;
    fill_normal(&bench.stream, seed, deviation, &mut out.all_mut())?;
    let got = out.all().to_vec(&bench.stream)?;
    let want = (0..count).map(|i| {
        let (pack, lane) = (i / 8, i % 8);
        let words = philox4x32_10([pack as u32, 0, (lane / 4) as u32, 0], [seed as u32, (seed >> 32) as u32]);
        let unit = |word: u32| f64::from(word >> 8) / f64::from(1 << 24);
        let (first, second) = (words[lane % 4 / 2 * 2], words[lane % 4 / 2 * 2 + 1]);
        let radius = (-2.0 * (unit(first) + 0.5 / f64::from(1 << 24)).ln()).sqrt() * f64::from(deviation);
        let angle = unit(second) * 2.0 * std::f64::consts::PI;
        let want = radius * if lane % 2 == 0 { angle.cos() } else { angle.sin() };
        (want, allowance::<T>(want, radius, 1e-5))
    });
    let error = worst(&got, T::to_f64, want);
    bench.report("fill_normal", format!("{} {count}", T::NAME), Found::Error(error));
    Ok(())
}
