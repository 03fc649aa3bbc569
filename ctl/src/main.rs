//! `pagedctl`, the program; what it does is the library's, so that `examples/pagedctl_pages.rs` can tell of it, too.

use std::process::ExitCode;

fn main() -> ExitCode {
    pagedctl::main()
}
