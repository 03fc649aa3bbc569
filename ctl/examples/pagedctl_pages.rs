//! Writes the manual pages of `pagedctl` and its commands, and its completions for bash, zsh and fish, into a folder.
//!
//! **Owns** their names, which are those that a package installs them under. **Never** says anything that `--help` does not.

use std::io;
use std::path::Path;

use clap_complete::Shell;

fn main() -> io::Result<()> {
    let mut args = std::env::args_os().skip(1);
    let (Some(folder), None) = (args.next(), args.next()) else {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "usage: pagedctl_pages FOLDER"));
    };
    let folder = Path::new(&folder);
    std::fs::create_dir_all(folder)?;
    clap_mangen::generate_to(pagedctl::command().disable_help_subcommand(true), folder)?;
    for (shell, name) in
        [(Shell::Bash, "pagedctl.bash"), (Shell::Zsh, "_pagedctl"), (Shell::Fish, "pagedctl.fish")]
    {
        let mut script = Vec::new();
        clap_complete::generate(shell, &mut pagedctl::command(), "pagedctl", &mut script);
        std::fs::write(folder.join(name), script)?;
    }
    Ok(())
}
