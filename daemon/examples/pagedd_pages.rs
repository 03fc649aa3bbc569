//! Writes the manual pages pagedd(8), with one for each of its commands, and pagedd.yaml(5) into a folder.
//!
//! **Owns** their names, which are those that a package installs them under. **Never** says anything that `--help` and etc/pagedd.yaml do not.

use std::path::Path;
use std::{fs, io};

use clap::CommandFactory;
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, roman};

#[path = "../src/cli.rs"]
mod cli;
#[path = "../src/bench/options.rs"]
#[allow(dead_code, reason = "only what can be typed is of interest here")]
mod options;
/// As far as the command line speaks of it.
mod bench {
    pub use super::options::Options;
}

/// Every setting, with its default and its meaning.
const SETTINGS: &str = include_str!("../../etc/pagedd.yaml");

fn main() -> io::Result<()> {
    let mut args = std::env::args_os().skip(1);
    let (Some(folder), None) = (args.next(), args.next()) else {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "usage: pagedd_pages FOLDER"));
    };
    let folder = Path::new(&folder);
    fs::create_dir_all(folder)?;
    let mut command = cli::Cli::command().disable_help_subcommand(true);
    command.build();
    pages(&command, folder)?;
    fs::write(folder.join("pagedd.yaml.5"), settings())
}

/// The page of a command, and those of its own.
fn pages(command: &clap::Command, folder: &Path) -> io::Result<()> {
    let name = command.get_display_name().unwrap_or_else(|| command.get_name()).to_owned();
    let page = Man::new(command.clone()).title(name.clone()).section("8");
    let mut text = Vec::new();
    page.render(&mut text)?;
    let mut others = Roff::new();
    see_also(&mut others, &[("pagedd.yaml", "5"), ("pagedctl", "1")]);
    others.to_writer(&mut text)?;
    fs::write(folder.join(format!("{name}.8")), text)?;
    command.get_subcommands().try_for_each(|command| pages(command, folder))
}

fn see_also(page: &mut Roff, others: &[(&str, &str)]) {
    page.control("SH", ["SEE ALSO"]);
    let each = others.iter().enumerate().flat_map(|(i, (name, section))| {
        let end = if i + 1 < others.len() { ", " } else { "" };
        [bold(*name), roman(format!("({section}){end}"))]
    });
    page.text(each.collect::<Vec<_>>());
}

/// pagedd.yaml(5): the file that is shipped explains itself.
fn settings() -> String {
    let version = concat!("pagedd ", env!("CARGO_PKG_VERSION"));
    let mut page = Roff::new();
    page.control("TH", ["pagedd.yaml", "5", "", version]);
    page.control("SH", ["NAME"]);
    page.text([roman("pagedd.yaml - configuration of pagedd(8)")]);
    page.control("SH", ["DESCRIPTION"]);
    page.text([
        roman("The daemon reads "),
        bold("/etc/pagedd/pagedd.yaml"),
        roman(", or what --config names, at its start and at SIGHUP. "),
        bold("pagedctl config check"),
        roman(" says whether the file holds, and "),
        bold("pagedctl plan"),
        roman(" what its models take of their devices. Below, what is commented out is the default."),
    ]);
    page.control("SH", ["SETTINGS"]);
    page.control("nf", []);
    for line in SETTINGS.lines() {
        page.text([roman(line)]);
    }
    page.control("fi", []);
    see_also(&mut page, &[("pagedd", "8"), ("pagedctl", "1")]);
    page.render()
}
