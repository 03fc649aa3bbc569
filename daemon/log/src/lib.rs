//! Where logs are written: standard error, which under systemd is its journal.
//!
//! **Owns** how a line's level is told there. **Never** decides what is logged, and never fails: a log that cannot be written is lost.

use std::io::{self, Write};
use std::os::fd::AsFd;
use std::path::Path;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::getpeername;
use tracing::{Level, Metadata};
use tracing_subscriber::fmt::MakeWriter;

/// Standard error. Where it leads to systemd's journal, each line starts with its priority as `sd-daemon(3)` has it, which the journal takes off.
#[derive(Clone, Copy, Debug)]
pub struct Stderr {
    journal: bool,
}

impl Stderr {
    /// As this process has it now.
    #[must_use]
    pub fn of_process() -> Self {
        Self { journal: leads_to_journal() }
    }

    /// Says why a program ends that has no log, or not yet.
    pub fn say_error(self, text: &str) {
        let mut out = self.line(Level::ERROR);
        for line in text.lines() {
            // There is nobody else to tell.
            let _ = out.write_all(format!("{line}\n").as_bytes());
        }
    }

    fn line(self, level: Level) -> Line {
        Line { prefix: if self.journal { prefix(level) } else { "" } }
    }
}

impl<'a> MakeWriter<'a> for Stderr {
    type Writer = Line;

    fn make_writer(&'a self) -> Line {
        self.line(Level::INFO)
    }

    fn make_writer_for(&'a self, about: &Metadata<'_>) -> Line {
        self.line(*about.level())
    }
}

/// One line: what is written at once.
#[derive(Debug)]
pub struct Line {
    prefix: &'static str,
}

impl Write for Line {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        let mut out = io::stderr().lock();
        if self.prefix.is_empty() {
            write_all(&mut out, text)?;
        } else {
            // In one piece: other processes write to the same journal.
            write_all(&mut out, &[self.prefix.as_bytes(), text].concat())?;
        }
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Waits where there is no room, also where another process that shares this one's standard error, a tenant's among them, has switched it to not
/// waiting.
fn write_all(out: &mut (impl Write + AsFd), mut text: &[u8]) -> io::Result<()> {
    while !text.is_empty() {
        match out.write(text) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => text = &text[written..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                let mut fds = [PollFd::new(out, PollFlags::OUT)];
                poll(&mut fds, None)?;
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Priorities of syslog.
fn prefix(level: Level) -> &'static str {
    match level {
        Level::ERROR => "<3>",
        Level::WARN => "<4>",
        Level::INFO => "<6>",
        Level::DEBUG | Level::TRACE => "<7>",
    }
}

/// Whether the other end of standard error is a socket of journald's, be it that of a namespace of its own.
fn leads_to_journal() -> bool {
    let Ok(Some(peer)) = getpeername(io::stderr()) else { return false };
    let Ok(peer) = rustix::net::SocketAddrUnix::try_from(peer) else { return false };
    peer.path().is_some_and(|path| is_journals(Path::new(&*path.to_string_lossy())))
}

fn is_journals(socket: &Path) -> bool {
    let folder = socket.parent().and_then(|folder| folder.strip_prefix("/run/systemd").ok()?.to_str());
    let journal = folder.is_some_and(|name| name == "journal" || name.starts_with("journal."));
    journal && socket.file_name().is_some_and(|name| name == "stdout")
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixStream;
    use std::thread;

    use super::*;

    #[test]
    fn a_line_is_written_whole_where_somebody_has_switched_the_other_end_to_not_waiting() {
        let (mut out, mut other) = UnixStream::pair().expect("a pair of sockets");
        out.set_nonblocking(true).expect("it does not wait");
        let text = vec![b'x'; 4 << 20];
        let read = thread::spawn(move || {
            let mut all = Vec::new();
            other.read_to_end(&mut all).map(|_| all)
        });
        write_all(&mut out, &text).expect("it is written");
        drop(out);
        assert!(read.join().expect("its thread").expect("it is read") == text);
    }

    #[test]
    fn only_sockets_of_journals_are_the_journal() {
        let is = |path: &str| is_journals(Path::new(path));
        assert!(is("/run/systemd/journal/stdout") && is("/run/systemd/journal.tenants/stdout"));
        let others =
            ["", "stdout", "/run/systemd/journal/socket", "/run/systemd/journalled/stdout", "/tmp/stdout"];
        for other in others {
            assert!(!is(other), "{other}");
        }
    }
}
