//! `pagedctl config check`: as the daemon would read it, without a daemon.

use crate::context::{Context, Environment};
use crate::failure::Failure;
use crate::table::{Align::Left, Table};
use pagedd_config::{Config, KvMemory};
use std::path::{Path, PathBuf};

/// What is checked.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The file [default: /etc/pagedd/pagedd.yaml]
    file: Option<PathBuf>,
}

/// The configuration in `file`, or in the one that `command` reads where none is named.
pub fn load<'a>(
    command: &str,
    file: Option<&'a Path>,
    environment: &'a Environment,
) -> Result<(&'a Path, Config), Failure> {
    let named = file.is_some();
    let file = file.unwrap_or(&environment.config);
    if !named && !file.exists() {
        return Err(Failure::Usage {
            message: format!("there is no configuration at {}", file.display()),
            hint: Some(format!("name a file: pagedctl {command} FILE")),
        });
    }
    Ok((file, Config::load(file)?))
}

/// What holds, or the first error.
pub fn run(args: &Args, context: &Context, environment: &Environment) -> Result<String, Failure> {
    let (file, config) = load("config check", args.file.as_deref(), environment)?;
    config.require_models()?;
    if context.json {
        let models: Vec<_> = config
            .models
            .iter()
            .map(|model| serde_json::json!({ "name": model.name.as_str(), "path": model.path.display().to_string() }))
            .collect();
        let summary = serde_json::json!({
            "file": file.display().to_string(),
            "valid": true,
            "state_dir": config.state_dir.display().to_string(),
            "admin_socket": config.admin_socket.display().to_string(),
            "models": models,
        });
        return Ok(format!("{summary:#}\n"));
    }
    let mut text = format!("{}: valid\n", file.display());
    let mut table = Table::new([
        ("MODEL", Left),
        ("DEVICE", Left),
        ("DTYPE", Left),
        ("KV DTYPE", Left),
        ("KV MEMORY", Left),
        ("PATH", Left),
    ]);
    for model in &config.models {
        table.row([
            model.name.to_string(),
            model.device.to_string(),
            model.dtype.to_string(),
            model.kv_dtype.to_string(),
            match model.kv_memory {
                KvMemory::Auto => "auto".to_owned(),
                KvMemory::Given(amount) => amount.to_string(),
            },
            model.path.display().to_string(),
        ]);
    }
    text.push_str(&table.render());
    Ok(text)
}
