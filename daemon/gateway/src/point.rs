//! Places at which a test ends the gateway.
//!
//! **Owns** nothing in a release. **Never** does anything but in test builds: see `fail`.
//!
//! A process ends at a point but for once, and leaves a mark. A gateway can make no file, so that the template makes it: for each mark there is a
//! pipe with one byte in it, which all of a template's gateways have. Whoever takes the byte ends, and at that end the template finds it gone.

#[cfg(feature = "failpoints")]
pub(crate) use marks::Marks;

/// In test builds the fail point `name` ends the process, unless an earlier one has left its mark at the path that it returns.
pub(crate) fn point(name: &str) {
    fail::fail_point!(name, |mark: Option<String>| {
        #[cfg(feature = "failpoints")]
        if mark.is_some_and(|mark| marks::is_first(&mark)) {
            std::process::abort();
        }
        #[cfg(not(feature = "failpoints"))]
        drop(mark);
    });
    // Without fail points it has no use.
    let _ = name;
}

#[cfg(feature = "failpoints")]
mod marks {
    use std::fs::File;
    use std::io::{Read as _, Write as _};
    use std::os::fd::{AsFd, BorrowedFd};
    use std::path::Path;
    use std::sync::OnceLock;

    use rustix::io::ioctl_fionread;
    use rustix::pipe::{PipeFlags, pipe_with};

    /// Of this template, and of the gateways that are forked from it.
    static MARKS: OnceLock<Vec<Mark>> = OnceLock::new();

    struct Mark {
        path: String,
        reader: File,
        /// Open in the template and in gateways, so that an empty pipe is no end of file.
        _writer: File,
    }

    /// The marks that this process's points may leave.
    #[derive(Clone, Copy)]
    pub(crate) struct Marks(&'static [Mark]);

    impl Marks {
        /// Those of the points that are on.
        pub fn new() -> Self {
            let paths = fail::list().into_iter().filter_map(|(name, actions)| {
                let path = actions.rsplit_once("return(")?.1.strip_suffix(')')?;
                name.starts_with("gateway-").then(|| path.to_owned())
            });
            Self(MARKS.get_or_init(|| paths.filter_map(Mark::new).collect()))
        }

        /// The fds that a gateway keeps.
        pub fn fds<'a>(self) -> impl Iterator<Item = BorrowedFd<'a>> {
            self.0.iter().map(|mark| -> BorrowedFd<'a> { mark.reader.as_fd() })
        }

        /// Makes the files of those that gateways have taken.
        pub fn settle(self) {
            for mark in self.0 {
                if ioctl_fionread(&mark.reader).is_ok_and(|left| left == 0) {
                    drop(File::create_new(&mark.path));
                }
            }
        }
    }

    impl Mark {
        fn new(path: String) -> Option<Self> {
            let (reader, writer) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).ok()?;
            let mut writer = File::from(writer);
            // One that an earlier template's gateway has left stays: nobody takes it again.
            if !Path::new(&path).exists() {
                writer.write_all(&[1]).ok()?;
            }
            Some(Self { path, reader: File::from(reader), _writer: writer })
        }
    }

    /// Whether this process is the first at a point, and the mark is its own.
    pub(super) fn is_first(path: &str) -> bool {
        match MARKS.get().and_then(|marks| marks.iter().find(|mark| mark.path == path)) {
            Some(mark) => (&mark.reader).read(&mut [0]).is_ok_and(|read| read == 1),
            // A point of the template's own.
            None => File::create_new(path).is_ok(),
        }
    }
}
