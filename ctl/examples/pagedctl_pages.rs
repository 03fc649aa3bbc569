//! Writes the manual pages of `pagedctl` and its commands, and its completions for bash, zsh and fish, into a folder.
//!
//! **Owns** their names, which are those that a package installs them under. **Never** says anything that `--help` does not.

use std::io;
use std::path::Path;

use clap_complete::Shell;
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, roman};

fn main() -> io::Result<()> {
    let mut args = std::env::args_os().skip(1);
    let (Some(folder), None) = (args.next(), args.next()) else {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "usage: pagedctl_pages FOLDER"));
    };
    let folder = Path::new(&folder);
    std::fs::create_dir_all(folder)?;
    let mut command = pagedctl::command().disable_help_subcommand(true);
    command.build();
    pages(&command, folder)?;
    for (shell, name) in
        [(Shell::Bash, "pagedctl.bash"), (Shell::Zsh, "_pagedctl"), (Shell::Fish, "pagedctl.fish")]
    {
        let mut script = Vec::new();
        clap_complete::generate(shell, &mut pagedctl::command(), "pagedctl", &mut script);
        std::fs::write(folder.join(name), script)?;
    }
    Ok(())
}

/// The page of a command, and those of its own.
fn pages(command: &clap::Command, folder: &Path) -> io::Result<()> {
    let page = Man::new(command.clone());
    let mut text = Vec::new();
    page.render(&mut text)?;
    let mut others = Roff::new();
    others.control("SH", ["SEE ALSO"]);
    let [own, daemon, settings] = ["pagedctl", "pagedd", "pagedd.yaml"].map(bold);
    others.text([own, roman("(1), "), daemon, roman("(8), "), settings, roman("(5)")]);
    others.to_writer(&mut text)?;
    std::fs::write(folder.join(page.get_filename()), text)?;
    command.get_subcommands().try_for_each(|command| pages(command, folder))
}
