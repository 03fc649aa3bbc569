//! control.db and journal.db that do not fit together: one is lost, or put back from a backup, or the daemon ended between the two.

mod tiny;

use std::fs;
use std::path::Path;
use std::time::Duration;

use pagedd_tests::daemon::{Site, Tenant};
use pagedd_tests::http::Response;
use pagedd_tests::wait;
use serde_json::{Value, json};

const LIMIT: Duration = Duration::from_mins(1);
/// More tokens than are computed before a daemon has ended.
const LONG: u32 = 9000;

fn body(max_tokens: u32) -> Value {
    json!({"model": "tiny", "prompt": [200, 201, 202, 203], "max_tokens": max_tokens, "temperature": 0, "ignore_eos": true})
}

/// Asks under a key that names the request, and returns the answer with the request's id.
fn ask(tenant: &Tenant) -> (Response, String) {
    let (path, body) = ("/v1/completions", body(8).to_string());
    let answer = tenant.http.open("POST", path, &[("idempotency-key", "the-same")], body.as_bytes());
    let id = answer.header("pagedd-request-id").map(str::to_owned);
    let answer = answer.into_response();
    let id = id.unwrap_or_else(|| panic!("no id: {} {}", answer.status, answer.text()));
    (answer, id)
}

/// Its port is open from the start, and answers once what was live is in the engine again.
fn wait_ready(tenant: &Tenant) {
    wait::until("the tenant's port is ready", LIMIT, || tenant.http.get("/readyz").status == 200);
}

/// Puts a database in place of that of a state directory, or nothing.
fn put(state: &Path, name: &str, from: Option<&Path>) {
    for side in ["", "-wal", "-shm"] {
        _ = fs::remove_file(state.join(format!("{name}{side}")));
    }
    if let Some(from) = from {
        fs::copy(from, state.join(name)).expect("put the database in place");
    }
}

fn number(answer: &Value, key: &str) -> u64 {
    answer[key].as_u64().unwrap_or_else(|| panic!("no {key}: {answer}"))
}

#[test]
fn an_older_control_db_gives_nobody_anothers_requests_and_they_go_on_with_the_right_one() {
    let folder = tempfile::tempdir().expect("a folder");
    let site = Site::new(&tiny::yaml(folder.path())).start().stop();
    let (older, newer) = (folder.path().join("older"), folder.path().join("newer"));
    fs::copy(site.state().join("control.db"), &older).expect("a backup");

    let daemon = site.start();
    let victim = daemon.add_tenant_of("tiny", "victim", "0%", "100%");
    let (said, ended) = ask(&victim);
    let mut events = victim
        .http
        .stream("/v1/completions", &[("pagedd-resumable", "1")], &{
            let mut body = body(LONG);
            body["stream"] = json!(true);
            body
        })
        .events();
    let live = events.header("pagedd-request-id").expect("an id").to_owned();
    events.next().expect("it has begun");
    let before = number(&daemon.tenant_info("victim"), "id");
    let site = daemon.stop();
    drop(events);
    fs::copy(site.state().join("control.db"), &newer).expect("a backup");

    put(&site.state(), "control.db", Some(&older));
    let daemon = site.start();
    let log = daemon.site().log_text();
    let line = log.lines().find(|line| line.contains("tenants that control.db does not know"));
    let line = line.unwrap_or_else(|| panic!("nothing is said:\n{log}"));
    for count in ["tenants=1", "live=1", "ended=1"] {
        assert!(line.contains(count), "{line}");
    }
    let evil = daemon.add_tenant_of("tiny", "evil", "0%", "100%");
    assert_eq!(number(&daemon.tenant_info("evil"), "id"), before + 1, "the number is given again");
    for id in [&ended, &live] {
        assert_eq!(evil.http.get(&format!("/v1/requests/{id}")).status, 404);
    }
    let (_, other) = ask(&evil);
    assert_ne!(other, ended, "another tenant's answer");
    let site = daemon.stop();

    put(&site.state(), "control.db", Some(&newer));
    let daemon = site.start();
    wait_ready(&victim);
    let (again, id) = ask(&victim);
    assert_eq!((&id, again.json()["choices"].clone()), (&ended, said.json()["choices"].clone()));
    let path = format!("/v1/requests/{live}");
    wait::until("what was live has ended", LIMIT, || {
        victim.http.get(&path).ok()["usage"]["completion_tokens"] == LONG
    });
    let third = daemon.add_tenant_of("tiny", "third", "0%", "100%");
    assert_eq!(number(&daemon.tenant_info("third"), "id"), before + 2, "evil's number is given again");
    assert_eq!(third.http.get(&format!("/v1/requests/{other}")).status, 404);
    daemon.stop();
}

#[test]
fn a_journal_beside_another_control_db_is_refused_and_a_lost_journal_is_said() {
    let folder = tempfile::tempdir().expect("a folder");
    let daemon = Site::new(&tiny::yaml(folder.path())).start();
    let acme = daemon.add_tenant_of("tiny", "acme", "0%", "100%");
    let (_, ended) = ask(&acme);
    let site = daemon.stop();
    assert!(!site.log_text().contains("there was no journal.db"), "of a first start");
    let [control, journal] = ["control.db", "journal.db"].map(|name| site.state().join(name));
    let backup = folder.path().join("backup");
    fs::copy(&control, &backup).expect("a backup");
    put(&site.state(), "control.db", None);
    for _ in 0..2 {
        let refused = site.run_to_end();
        let names = [&control, &journal].map(|path| path.display().to_string());
        refused.refused(&names.each_ref().map(String::as_str));
        refused.refused(&["two installations", "put the control.db back", "move journal.db away"]);
        assert_eq!(refused.code, Some(73), "{}", refused.text);
    }
    put(&site.state(), "control.db", Some(&backup));
    let daemon = site.start();
    wait_ready(&acme);
    assert_eq!(ask(&acme).1, ended, "nothing was lost");
    let site = daemon.stop();

    put(&site.state(), "journal.db", None);
    let daemon = site.start();
    assert!(
        daemon.site().log_text().contains("there was no journal.db"),
        "nothing is said of the lost journal"
    );
    wait_ready(&acme);
    assert_ne!(ask(&acme).1, ended);
    daemon.stop();
}

#[test]
fn what_a_daemon_left_that_ended_in_a_removal_is_deleted_and_not_taken_for_a_strangers() {
    let folder = tempfile::tempdir().expect("a folder");
    let site = Site::new(&tiny::yaml(folder.path())).with_points_by_start(&["journal-delete=panic"]);
    let mut daemon = site.start();
    let acme = daemon.add_tenant_of("tiny", "acme", "0%", "100%");
    ask(&acme);
    daemon.ctl(&["tenant", "remove", "acme", "--force"]);
    wait::until("another daemon answers", LIMIT, || {
        daemon.site().starts() > 1 && daemon.ctl(&["status"]).code == Some(0)
    });
    daemon.wait_ready();
    assert_eq!(daemon.status()["tenants"], json!([]));
    let site = daemon.stop();
    let daemon = site.start();
    let log = daemon.site().log_text();
    assert!(!log.contains("does not know"), "what was left of it stays:\n{log}");
    daemon.stop();
}
