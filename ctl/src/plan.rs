//! `pagedctl plan`: what a configuration's models take of their devices, without a daemon.
//!
//! The sums are the worker's: `pagedd-worker plan` reads each model, and knows how it lays its arenas out.

use crate::config_check;
use crate::context::{Context, Environment};
use crate::failure::Failure;
use crate::show::{UNKNOWN, bytes};
use crate::table::{Align::Left, Align::Right, Table};
use pagedd_config::{Amount, Device, KvMemory, Model};
use serde_json::{Map, Value, json};
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// What is planned.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The file [default: /etc/pagedd/pagedd.yaml]
    file: Option<PathBuf>,
}

/// A device's memory, as models take it one after the other.
struct Share {
    device: Device,
    /// Before the first of them.
    free: Option<u64>,
    /// Why it is not known.
    unknown: Option<String>,
    taken: u64,
}

/// The sums, or what does not fit.
pub fn run(args: &Args, context: &Context, environment: &Environment) -> Result<String, Failure> {
    let (file, config) = config_check::load("plan", args.file.as_deref(), environment)?;
    let models = config.require_models()?;
    let (mut sums, mut shares) = (Vec::new(), Vec::new());
    for model in models {
        let share = share_of(&mut shares, model.device);
        let sum = ask(environment, model, share.taken)?;
        if share.taken == 0 {
            share.free = sum["free_bytes"].as_u64();
            share.unknown = sum["free_unknown"].as_str().map(str::to_owned);
        }
        share.taken += needed(&sum);
        sums.push((model, sum));
    }
    let problems: Vec<String> = sums
        .iter()
        .filter_map(|(model, sum)| Some(format!("model {}: {}", model.name, sum["problem"].as_str()?)))
        .collect();
    let text = if context.json {
        format!("{:#}\n", as_json(&file.display().to_string(), &sums, &shares))
    } else {
        as_tables(&sums, &shares)
    };
    if problems.is_empty() {
        return Ok(text);
    }
    let memory = sums.iter().any(|(model, sum)| lacks_memory(model, sum));
    Err(Failure::NoRoom { problems: problems.join("; "), memory, text })
}

/// Whether a model was read and does not fit, though it asks for a KV block at least.
fn lacks_memory(model: &Model, sum: &Value) -> bool {
    let asked = match model.kv_memory {
        KvMemory::Given(Amount::Bytes(bytes)) => Some(bytes.0),
        KvMemory::Auto | KvMemory::Given(Amount::Percent(_) | Amount::Tokens(_)) => None,
    };
    let block = sum["block_bytes"].as_u64();
    sum["problem"].is_string() && block.is_some_and(|block| asked.is_none_or(|asked| asked >= block))
}

fn share_of(shares: &mut Vec<Share>, device: Device) -> &mut Share {
    let at = shares.iter().position(|share| share.device == device).unwrap_or_else(|| {
        shares.push(Share { device, free: None, unknown: None, taken: 0 });
        shares.len() - 1
    });
    &mut shares[at]
}

/// What a worker says of a model, before which others take `taken` bytes of its device.
fn ask(environment: &Environment, model: &Model, taken: u64) -> Result<Value, Failure> {
    let program = &environment.worker;
    let mut command = Command::new(program);
    command.arg("plan").arg("--model").arg(&model.path);
    for (name, value) in [
        ("--device", model.device.to_string()),
        ("--dtype", model.dtype.to_string()),
        ("--kv-dtype", model.kv_dtype.to_string()),
        ("--kv-memory", amount(model.kv_memory)),
        ("--block-size", model.block_size.0.to_string()),
        ("--max-num-seqs", model.max_num_seqs.to_string()),
        ("--max-num-batched-tokens", model.max_num_batched_tokens.0.to_string()),
        ("--taken", taken.to_string()),
    ] {
        command.args([name, value.as_str()]);
    }
    if model.deterministic {
        command.arg("--deterministic");
    }
    if let Some(limit) = model.max_model_len {
        command.args(["--max-model-len", &limit.0.to_string()]);
    }
    // As the daemon starts it: GPUs are counted as the bus has them.
    command
        .env("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        .env_remove("CUDA_VISIBLE_DEVICES")
        .env("PAGEDD_LOG", "error");
    let output = command
        .stdin(Stdio::null())
        .output()
        .map_err(|source| Failure::Worker { program: program.clone(), source })?;
    if output.status.success() {
        return Ok(serde_json::from_slice(&output.stdout)?);
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let last = said.lines().rfind(|line| !line.trim().is_empty());
    let ended = || format!("{} ended: {}", program.display(), output.status);
    Ok(json!({ "problem": last.map_or_else(ended, str::to_owned) }))
}

/// An amount as `pagedd-worker plan` reads it.
fn amount(memory: KvMemory) -> String {
    match memory {
        KvMemory::Auto => "auto".to_owned(),
        KvMemory::Given(amount @ Amount::Percent(_)) => amount.to_string(),
        KvMemory::Given(Amount::Bytes(bytes)) => format!("{}B", bytes.0),
        KvMemory::Given(Amount::Tokens(tokens)) => format!("{}tokens", tokens.0),
    }
}

/// Bytes that a model takes of its device, as far as they are known.
fn needed(sum: &Value) -> u64 {
    let parts = [&sum["weight_bytes"], &sum["overhead_bytes"], &sum["kv"]["bytes"]];
    parts.iter().filter_map(|part| part.as_u64()).sum()
}

fn as_json(file: &str, sums: &[(&Model, Value)], shares: &[Share]) -> Value {
    let model = |(model, sum): &(&Model, Value)| {
        let mut all = Map::new();
        all.insert("name".to_owned(), json!(model.name.as_str()));
        all.insert("path".to_owned(), json!(model.path.display().to_string()));
        all.insert("device".to_owned(), json!(model.device.to_string()));
        all.extend(sum.as_object().cloned().unwrap_or_default());
        all.insert("needed_bytes".to_owned(), json!(needed(sum)));
        Value::Object(all)
    };
    let device = |share: &Share| {
        json!({
            "device": share.device.to_string(),
            "free_bytes": share.free,
            "free_unknown": share.unknown,
            "needed_bytes": share.taken,
        })
    };
    json!({
        "file": file,
        "models": sums.iter().map(model).collect::<Vec<_>>(),
        "devices": shares.iter().map(device).collect::<Vec<_>>(),
    })
}

fn as_tables(sums: &[(&Model, Value)], shares: &[Share]) -> String {
    let mut models = Table::new([
        ("MODEL", Left),
        ("DEVICE", Left),
        ("WEIGHTS", Right),
        ("KV A TOKEN", Right),
        ("KV A BLOCK", Right),
        ("BLOCKS", Right),
        ("TOKENS", Right),
        ("KV", Right),
        ("SCRATCH", Right),
        ("SUM", Right),
    ]);
    for (model, sum) in sums {
        let size = |value: &Value| value.as_u64().map_or_else(|| UNKNOWN.to_owned(), bytes);
        let count = |value: &Value| value.as_u64().map_or_else(|| UNKNOWN.to_owned(), |n| n.to_string());
        let kv = &sum["kv"];
        models.row([
            model.name.to_string(),
            model.device.to_string(),
            size(&sum["weight_bytes"]),
            size(&sum["token_bytes"]),
            size(&sum["block_bytes"]),
            count(&kv["blocks"]),
            count(&kv["tokens"]),
            size(&kv["bytes"]),
            size(&sum["overhead_bytes"]),
            if kv.is_null() { UNKNOWN.to_owned() } else { bytes(needed(sum)) },
        ]);
    }
    let mut devices = Table::new([("DEVICE", Left), ("FREE", Right), ("NEEDED", Right), ("LEFT", Right)]);
    let mut notes = String::new();
    for share in shares {
        let left = share.free.and_then(|free| free.checked_sub(share.taken));
        devices.row([
            share.device.to_string(),
            share.free.map_or_else(|| UNKNOWN.to_owned(), bytes),
            bytes(share.taken),
            left.map_or_else(|| UNKNOWN.to_owned(), bytes),
        ]);
        if let Some(why) = &share.unknown {
            notes = format!("{notes}note: what is free on {} is not known: {why}\n", share.device);
        }
    }
    format!("{}\n{}{notes}", models.render(), devices.render())
}

#[cfg(test)]
mod tests;
