//! What the service manager shows of the daemon: one line that an operator understands, sent when it changes.
//!
//! **Owns** its words. **Never** tells of single steps or requests, nor more than once in [`PAUSE`].

use std::sync::Arc;
use std::time::Duration;

use pagedd_control::{DrainState, ReloadInfo, ReloadOutcome};
use pagedd_host::notify;
use tokio::sync::{Notify, mpsc, watch};
use tracing::warn;

use crate::drain;
use crate::hub::{Load, Message};
use crate::model::Model;
use crate::worker::ModelState;

/// Between two lines: a load says a thousand times how far it is.
const PAUSE: Duration = Duration::from_secs(1);

/// What the daemon's task says of itself.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Standing {
    /// How many tenants are served.
    pub tenants: usize,
    /// Whether it admits requests.
    pub drain: DrainState,
    /// What became of the last order to read the configuration again.
    pub reload: Option<ReloadInfo>,
}

/// Tells the manager how the daemon stands, as long as there is one to tell of.
pub async fn report(
    models: Vec<Arc<Model>>,
    mut standing: watch::Receiver<Standing>,
    hub: mpsc::Sender<Message>,
) {
    if !notify::has_manager() {
        return;
    }
    let changed = Arc::new(Notify::new());
    for model in &models {
        let (mut state, changed) = (model.state.clone(), changed.clone());
        tokio::spawn(async move {
            while state.changed().await.is_ok() {
                changed.notify_one();
            }
        });
    }
    let mut told = String::new();
    loop {
        let now = standing.borrow_and_update().clone();
        let left = match now.drain {
            DrainState::Admitting => None,
            DrainState::Draining { .. } | DrainState::Stopping { .. } => drain::load(&hub).await,
        };
        let states: Vec<_> = models.iter().map(|model| model.state.borrow().clone()).collect();
        let names = models.iter().map(|model| model.name.as_str());
        let line = line(&names.zip(&states).collect::<Vec<_>>(), &now, left);
        if line != told {
            if let Err(error) = notify::status(&line) {
                warn!(%error, "the service manager does not know how the daemon stands");
            }
            told = line;
        }
        tokio::time::sleep(PAUSE).await;
        tokio::select! {
            changed = standing.changed() => if changed.is_err() { return },
            () = changed.notified() => {}
            // What is left has changed.
            () = std::future::ready(()), if now.drain != DrainState::Admitting => {}
        }
    }
}

/// The line. Of a daemon that drains, `left` is what it waits for, where that is known.
fn line(models: &[(&str, &ModelState)], standing: &Standing, left: Option<Load>) -> String {
    let mut parts = Vec::new();
    let left = left
        .map_or_else(String::new, |Load { requests, .. }| format!(": {} left", count(requests, "request")));
    match standing.drain {
        DrainState::Stopping { .. } => return format!("draining{left}"),
        DrainState::Draining { .. } => parts.push(format!("taking no new requests{left}")),
        DrainState::Admitting => {}
    }
    let serving = models.iter().filter(|(_, state)| state.model().is_some()).count();
    if serving > 0 {
        let tenants = count(u32::try_from(standing.tenants).unwrap_or(u32::MAX), "tenant");
        let models = count(serving as u32, "model");
        parts.push(if standing.tenants == 0 {
            format!("{models} ready, no tenants")
        } else {
            format!("serving {tenants} on {models}")
        });
    }
    for (name, state) in models {
        parts.extend(match state {
            ModelState::Ready(_) => None,
            ModelState::Loading { permille } => Some(format!("loading {name} {} %", permille / 10)),
            ModelState::Restarting { attempt, .. } => {
                Some(format!("replacing the worker of {name} (attempt {attempt})"))
            }
            ModelState::Failed { error } => Some(format!("model {name} failed: {error}")),
        });
    }
    match standing.reload.as_ref().map(|reload| &reload.outcome) {
        Some(ReloadOutcome::Refused { error }) => parts.push(format!("configuration refused: {error}")),
        Some(ReloadOutcome::Applied { later, .. }) if !later.is_empty() => {
            parts.push(format!("at the next restart: {}", later.join(", ")));
        }
        Some(ReloadOutcome::Applied { .. }) | None => {}
    }
    parts.join("; ")
}

fn count(number: u32, what: &str) -> String {
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_says_what_an_operator_wants_to_know() {
        let loading = ModelState::Loading { permille: 437 };
        let failed = ModelState::Failed { error: "no such file".to_owned() };
        let again = ModelState::Restarting { attempt: 2, last: None };
        let reload = |outcome| Some(ReloadInfo { at_unix: 0, outcome });
        let refused = || reload(ReloadOutcome::Refused { error: "pagedd.yaml:3:1: unknown key".to_owned() });
        let later = || {
            reload(ReloadOutcome::Applied {
                now: vec!["retention".to_owned()],
                later: vec!["listen".to_owned()],
            })
        };
        let standing = |drain, reload| Standing { tenants: 2, drain, reload };
        let draining = DrainState::Draining { since_unix: 0, deadline_unix: None };
        let stopping = DrainState::Stopping { since_unix: 0, deadline_unix: 9 };
        let left = |requests| Some(Load { requests, too_large: 0, streams: 0 });
        let one = [("smollm2", &loading)];
        assert_eq!(line(&one, &standing(DrainState::Admitting, None), None), "loading smollm2 43 %");
        assert_eq!(
            line(&one, &standing(draining, None), left(1)),
            "taking no new requests: 1 request left; loading smollm2 43 %"
        );
        assert_eq!(line(&one, &standing(stopping, refused()), left(3)), "draining: 3 requests left");
        assert_eq!(line(&one, &standing(stopping, None), None), "draining");
        assert_eq!(
            line(&[("a", &failed), ("b", &again)], &standing(DrainState::Admitting, refused()), None),
            "model a failed: no such file; replacing the worker of b (attempt 2); configuration refused: pagedd.yaml:3:1: unknown key"
        );
        assert_eq!(
            line(&one, &standing(DrainState::Admitting, later()), None),
            "loading smollm2 43 %; at the next restart: listen"
        );
        assert_eq!(count(2, "tenant"), "2 tenants");
    }
}
