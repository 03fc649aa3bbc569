//! `pagedctl reload`.

use crate::context::Context;
use crate::failure::Failure;
use pagedd_control::{Command, ReloadInfo, ReloadOutcome, Reply};

/// What of the configuration, read again, takes effect when.
pub fn run(context: &Context) -> Result<String, Failure> {
    context.ask(Command::Reload, |reply| match reply {
        Reply::Reloaded(info) => Some(render(info)),
        _ => None,
    })
}

fn render(info: &ReloadInfo) -> String {
    match &info.outcome {
        ReloadOutcome::Applied { now, later } if now.is_empty() && later.is_empty() => {
            "the configuration was read again; nothing has changed\n".to_owned()
        }
        ReloadOutcome::Applied { now, later } => {
            let line = |when, settings: &[String]| match settings {
                [] => String::new(),
                settings => format!("{when}: {}\n", settings.join(", ")),
            };
            line("now", now) + &line("at the next restart", later)
        }
        ReloadOutcome::Refused { error } => format!("refused: {error}\n"),
    }
}

/// What there is to say of the last reload beside the configuration's path.
pub fn note(info: Option<&ReloadInfo>) -> String {
    match info.map(|info| &info.outcome) {
        Some(ReloadOutcome::Refused { error }) => {
            format!("; as it is now it is refused, and the one before in force: {error}")
        }
        Some(ReloadOutcome::Applied { later, .. }) if !later.is_empty() => {
            format!("; at the next restart: {}", later.join(", "))
        }
        Some(ReloadOutcome::Applied { .. }) | None => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_names_what_a_reload_left_undone() {
        let after = |outcome| note(Some(&ReloadInfo { at_unix: 9, outcome }));
        let refused = after(ReloadOutcome::Refused { error: "/p.yaml:1:1: x".to_owned() });
        assert_eq!(refused, "; as it is now it is refused, and the one before in force: /p.yaml:1:1: x");
        let applied = |later: &[&str]| ReloadOutcome::Applied {
            now: vec!["retention".to_owned()],
            later: later.iter().map(|key| (*key).to_owned()).collect(),
        };
        assert_eq!(after(applied(&["listen", "fsync"])), "; at the next restart: listen, fsync");
        assert_eq!((after(applied(&[])), note(None)), (String::new(), String::new()));
    }
}
