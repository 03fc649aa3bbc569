//! Errors as text.

use std::error::Error;

/// An error and what caused it, joined by `: `. Many a message says its cause itself; nothing is said twice.
#[must_use]
pub fn said(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let next = error.to_string();
        if !text.contains(&next) {
            text = format!("{text}: {next}");
        }
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::said;
    use std::error::Error;
    use std::fmt;

    #[derive(Debug)]
    struct Told(&'static str, Option<Box<Told>>);

    impl fmt::Display for Told {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str(self.0)
        }
    }

    impl Error for Told {
        fn source(&self) -> Option<&(dyn Error + 'static)> {
            self.1.as_ref().map(|cause| &**cause as _)
        }
    }

    fn caused(text: &'static str, cause: Told) -> Told {
        Told(text, Some(Box::new(cause)))
    }

    #[test]
    fn a_cause_that_the_message_says_itself_is_not_said_twice() {
        let denied = Told("Permission denied (os error 13)", None);
        let run = caused("cannot run x: Permission denied (os error 13)", denied);
        assert_eq!(
            said(&caused("model `m`", run)),
            "model `m`: cannot run x: Permission denied (os error 13)"
        );
    }

    #[test]
    fn causes_that_differ_are_said_in_their_order() {
        assert_eq!(said(&caused("a", caused("b", Told("c", None)))), "a: b: c");
    }
}
