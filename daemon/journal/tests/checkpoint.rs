//! Checkpoints as directories: what comes back, what is refused and why, and what a cut leaves.

#![allow(clippy::unwrap_used)]

mod common;

use std::fs::{self, OpenOptions};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use common::{END, NOW, admit, finish, replay, step, token};
use pagedd_core::{Quotas, TenantId};
use pagedd_journal::checkpoint::{
    Checkpoint, CheckpointError, Contents, Difference, Draft, ModelIdentity, SavedModel, SavedTenant,
    finish_restore, list, named,
};
use pagedd_journal::{ControlDb, Fsync, JournalDb, NewKey, NewTenant};
use serde_json::{Value, json};
use tempfile::TempDir;

fn identity() -> ModelIdentity {
    ModelIdentity {
        name: "smollm2".to_owned(),
        architecture: "llama".to_owned(),
        parameters: 135_000_000,
        dtype: "auto".to_owned(),
        kv_dtype: "f16".to_owned(),
        block_size: 16,
        block_bytes: 368_640,
        kv_layout: 1,
        kernels: "avx2".to_owned(),
        digest: "00ff".to_owned(),
    }
}

fn models() -> Vec<SavedModel> {
    vec![SavedModel { identity: identity(), blocks: 3, kv: true }]
}

/// A state directory with two tenants, a live request of each and one that has ended.
fn state() -> (TempDir, ControlDb, JournalDb) {
    let dir = tempfile::tempdir().unwrap();
    let mut control = ControlDb::open(dir.path()).unwrap();
    for (name, port) in [("acme", 8101), ("globex", 8102)] {
        let new = NewTenant {
            name: name.to_owned(),
            port,
            model: "smollm2".to_owned(),
            kv_floor: "0%".to_owned(),
            kv_ceiling: "100%".to_owned(),
            auth: true,
            prompt_lookup: None,
            retention_ms: None,
            quotas: Quotas::default(),
            limits: None,
        };
        control.add_tenant(&new, Some(&NewKey::draw().unwrap()), NOW as i64).unwrap();
    }
    let mut journal = JournalDb::open(dir.path(), Fsync::Never).unwrap();
    journal.append(&[admit(1, 1), admit(2, 2), admit(3, 2)], NOW).unwrap();
    journal.append(&[step([(1, token(0, 5)), (2, token(1, 6)), (1, token(1, 7))])], NOW).unwrap();
    journal.append(&[step([(3, finish(0)), (3, finish(1)), (3, END)])], NOW).unwrap();
    (dir, control, journal)
}

fn draft(dir: &Path, name: &str, control: &ControlDb, journal: &JournalDb) -> Draft {
    let draft = Draft::begin(dir, name).unwrap();
    control.save(&draft.file("control.db")).unwrap();
    journal.save(&draft.file("journal.db")).unwrap();
    for name in ["ledger-smollm2", "kv-smollm2"] {
        draft.create(name).unwrap().write_all_at(&[7; 1000], 0).unwrap();
    }
    draft
}

fn save(dir: &Path, name: &str, control: &ControlDb, journal: &JournalDb) -> Checkpoint {
    draft(dir, name, control, journal).finish("0.1.0", NOW, models()).unwrap()
}

/// A checkpoint, and where it lies.
fn saved() -> (TempDir, PathBuf) {
    let (dir, control, journal) = state();
    let path = save(dir.path(), "one", &control, &journal).path().to_path_buf();
    (dir, path)
}

/// Changes a byte of a file.
fn flip(path: &Path, at: u64) {
    let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[!byte[0]], at).unwrap();
}

fn problems(path: &Path) -> Vec<String> {
    Checkpoint::open(path).unwrap().problems().iter().map(ToString::to_string).collect()
}

fn refusal(path: &Path) -> String {
    Checkpoint::open(path).unwrap_err().to_string()
}

#[test]
fn what_was_saved_is_what_the_next_start_finds_and_what_was_there_is_kept_aside() {
    let (old, control, mut journal) = state();
    let checkpoint = save(old.path(), "one", &control, &journal);
    assert_eq!(Checkpoint::open(checkpoint.path()).unwrap(), checkpoint);
    assert_eq!(checkpoint.problems(), []);
    assert_eq!(checkpoint.installation_secret().unwrap(), *control.installation_secret());
    let tenant = |id, name: &str, live: u32, prompt_tokens, output_tokens, ended| SavedTenant {
        id,
        name: name.to_owned(),
        model: "smollm2".to_owned(),
        keys: 1,
        live,
        prompt_tokens,
        output_tokens,
        ended,
    };
    let tenants = vec![tenant(1, "acme", 1, 6, 2, 0), tenant(2, "globex", 1, 7, 1, 1)];
    assert_eq!(checkpoint.contents().unwrap(), Contents { tenants, damaged_requests: 0 });
    let (tenants, requests) = (control.tenants().unwrap(), replay(&journal));

    // Life goes on where it was saved; elsewhere there was another one.
    journal.append(&[step([(1, token(0, 9))])], NOW).unwrap();
    let (new, other_control, other_journal) = state();
    let (other_secret, other_requests) = (*other_control.installation_secret(), replay(&other_journal));
    drop((other_control, other_journal));
    let aside = checkpoint.put_in_place(new.path(), NOW).unwrap();
    let (placed, placed_journal) =
        (ControlDb::open(new.path()).unwrap(), JournalDb::open(new.path(), Fsync::Never).unwrap());
    assert_eq!(
        (placed.tenants().unwrap(), placed.installation_secret()),
        (tenants, control.installation_secret())
    );
    assert_eq!(placed.keys(TenantId(1)).unwrap(), control.keys(TenantId(1)).unwrap());
    assert_eq!(replay(&placed_journal), requests);
    assert_eq!(*ControlDb::open(&aside).unwrap().installation_secret(), other_secret);
    assert_eq!(replay(&JournalDb::open(&aside, Fsync::Never).unwrap()), other_requests);
    drop((placed, placed_journal));
    // Into the same second, and again.
    assert_ne!(checkpoint.put_in_place(new.path(), NOW).unwrap(), aside);
    assert_eq!(finish_restore(new.path()).unwrap(), None);
}

#[test]
fn a_checkpoint_is_its_owners_alone() {
    let (dir, path) = saved();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&dir.path().join("checkpoints")), mode(&path)), (0o700, 0o700));
    for entry in fs::read_dir(&path).unwrap() {
        assert_eq!(mode(&entry.unwrap().path()), 0o600);
    }
}

#[test]
fn verify_names_each_file_that_is_torn_changed_missing_or_too_many() {
    let (_dir, path) = saved();
    flip(&path.join("kv-smollm2"), 500);
    fs::remove_file(path.join("ledger-smollm2")).unwrap();
    flip(&path.join("control.db"), 5000);
    OpenOptions::new().write(true).open(path.join("journal.db")).unwrap().set_len(4096).unwrap();
    fs::write(path.join("journal.db-wal"), "x").unwrap();
    let found = problems(&path);
    let expected = [
        "journal.db: it has 4096 bytes, ",
        "ledger-smollm2: it is missing",
        "journal.db-wal: it was not there when the checkpoint was written",
        "control.db: its SHA-256 is wrong",
        "kv-smollm2: its SHA-256 is wrong",
    ];
    assert_eq!(found.len(), expected.len(), "{found:?}");
    for (found, expected) in found.iter().zip(expected) {
        assert!(found.starts_with(expected), "{found} is not {expected}…");
    }
}

#[test]
fn a_checkpoint_whose_control_db_is_gone_says_that_it_is_missing() {
    let (_dir, path) = saved();
    fs::remove_file(path.join("control.db")).unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    for error in [checkpoint.contents().unwrap_err(), checkpoint.installation_secret().unwrap_err()] {
        assert_eq!(error.to_string(), format!("{} is missing", path.join("control.db").display()));
    }
}

/// Writes a checkpoint whose journal.db is `bytes`, with right digests.
fn with_journal(bytes: &[u8]) -> Vec<String> {
    let (dir, control, _journal) = state();
    let draft = Draft::begin(dir.path(), "one").unwrap();
    control.save(&draft.file("control.db")).unwrap();
    draft.create("journal.db").unwrap().write_all_at(bytes, 0).unwrap();
    let checkpoint = draft.finish("0.1.0", NOW, Vec::new()).unwrap();
    problems(checkpoint.path())
}

#[test]
fn a_database_that_is_damaged_foreign_or_of_a_newer_version_is_named_though_its_digest_is_right() {
    let (_dir, path) = saved();
    assert_eq!(with_journal(b""), ["journal.db: it is not pagedd's"]);
    let control = fs::read(path.join("control.db")).unwrap();
    assert_eq!(with_journal(&control), ["journal.db: it is not pagedd's"]);
    let mut newer = fs::read(path.join("journal.db")).unwrap();
    // `user_version` of SQLite's file format, at offset 60.
    newer[60..64].copy_from_slice(&9_u32.to_be_bytes());
    assert_eq!(with_journal(&newer), ["journal.db: schema version 4 here, 9 there"]);
    let mut torn = fs::read(path.join("journal.db")).unwrap();
    let half = torn.len() / 2;
    torn[half..].fill(0x5a);
    let found = with_journal(&torn);
    assert!(found[0].starts_with("journal.db: it is damaged ("), "{found:?}");
    assert!(with_journal(b"#!/bin/sh")[0].starts_with("journal.db: it is damaged ("));
}

/// Changes the manifest as JSON.
fn edit(path: &Path, change: impl FnOnce(&mut Value)) {
    let file = path.join("manifest.json");
    let mut value: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    change(&mut value);
    fs::write(file, value.to_string()).unwrap();
}

#[test]
fn a_manifest_that_is_foreign_torn_changed_or_of_a_future_format_is_refused_by_name() {
    let (dir, path) = saved();
    let manifest = path.join("manifest.json");
    let whole = fs::read(&manifest).unwrap();
    let shown = path.display();

    assert_eq!(
        refusal(&dir.path().join("none")),
        format!("there is no checkpoint at {}/none", dir.path().display())
    );
    assert!(refusal(&manifest).ends_with("is no checkpoint of pagedd's: it is no directory"));
    assert!(refusal(dir.path()).ends_with("is no checkpoint of pagedd's: it has no manifest.json"));
    fs::write(&manifest, "{\"name\":\"x\"}").unwrap();
    assert!(refusal(&path).ends_with("is no checkpoint of pagedd's: its manifest.json names no format"));
    fs::write(&manifest, &whole[..whole.len() / 2]).unwrap();
    assert!(refusal(&path).starts_with(&format!("checkpoint {shown}: manifest.json: EOF while parsing")));
    fs::write(&manifest, &whole).unwrap();
    edit(&path, |value| value["manifest"]["models"][0]["identity"]["block_size"] = json!(32));
    assert_eq!(refusal(&path), format!("checkpoint {shown}: manifest.json: its SHA-256 is wrong"));
    // Whatever else a later format has.
    edit(&path, |value| *value = json!({"manifest": {"format": 2, "new": true}}));
    assert_eq!(
        refusal(&path),
        format!("checkpoint {shown}: format 1 here, 2 there; use the pagedd that wrote it")
    );
}

#[test]
fn a_pipe_in_the_place_of_a_checkpoints_file_is_refused_by_name_and_not_waited_for() {
    for file in ["manifest.json", "control.db", "journal.db"] {
        let (_dir, path) = saved();
        let at = path.join(file);
        fs::remove_file(&at).unwrap();
        assert!(Command::new("mkfifo").arg(&at).status().unwrap().success());
        let refusal = refusal(&path);
        assert!(refusal.contains(&format!("{file}: it is no regular file")), "{refusal}");
    }
}

#[test]
fn a_checkpoint_of_another_model_is_refused_with_the_first_difference() {
    let (_dir, path) = saved();
    let checkpoint = Checkpoint::open(&path).unwrap();
    let compare = |here: &[ModelIdentity]| checkpoint.manifest().compare(here).map_err(|e| e.to_string());
    assert_eq!(compare(&[ModelIdentity { name: "other".to_owned(), ..identity() }, identity()]), Ok(()));
    assert_eq!(compare(&[]), Err("model smollm2 is not configured here".to_owned()));
    let cases = [
        (ModelIdentity { block_size: 32, block_bytes: 1, ..identity() }, "block_size 32 here, 16 there"),
        (ModelIdentity { dtype: "f32".to_owned(), ..identity() }, "dtype f32 here, auto there"),
        (ModelIdentity { kv_dtype: "f32".to_owned(), ..identity() }, "kv_dtype f32 here, f16 there"),
        (ModelIdentity { digest: "01".to_owned(), ..identity() }, "digest 01 here, 00ff there"),
        (ModelIdentity { kernels: "amx".to_owned(), ..identity() }, "kernels amx here, avx2 there"),
    ];
    for (here, difference) in cases {
        assert_eq!(compare(&[here]), Err(format!("model smollm2: {difference}")));
    }
    let missing = checkpoint.manifest().compare(&[]);
    assert_eq!(missing, Err(Difference::Model { model: "smollm2".to_owned() }));
}

#[test]
fn a_save_that_is_cut_off_leaves_nothing_that_the_list_has_and_the_next_one_clears_it_away() {
    let (dir, control, journal) = state();
    // As a killed daemon leaves it: nothing is dropped.
    std::mem::forget(draft(dir.path(), "one", &control, &journal));
    assert!(list(dir.path()).unwrap().is_empty());
    drop(draft(dir.path(), "one", &control, &journal));
    assert_eq!(fs::read_dir(dir.path().join("checkpoints")).unwrap().count(), 0);
    save(dir.path(), "one", &control, &journal);
    let again = Draft::begin(dir.path(), "one").unwrap_err();
    assert_eq!(again.to_string(), "there is a checkpoint `one` already");
}

#[test]
fn parts_of_what_was_cut_off_are_gone_after_the_next_start() {
    let dir = tempfile::tempdir().unwrap();
    let parts = ["checkpoints/.saving", ".restoring.partial"].map(|part| dir.path().join(part));
    for part in &parts {
        fs::create_dir_all(part).unwrap();
        fs::write(part.join("journal.db"), b"a prompt").unwrap();
    }
    assert_eq!(finish_restore(dir.path()).unwrap(), None);
    assert!(parts.iter().all(|part| !part.exists()));
}

#[test]
fn the_list_has_damaged_checkpoints_too() {
    let (dir, control, journal) = state();
    assert!(list(dir.path()).unwrap().is_empty());
    for name in ["b", "c", "a"] {
        save(dir.path(), name, &control, &journal);
    }
    fs::write(dir.path().join("checkpoints/b/manifest.json"), "").unwrap();
    fs::write(dir.path().join("checkpoints/stray"), "").unwrap();
    let found = list(dir.path()).unwrap();
    let states: Vec<_> = found.iter().map(|(name, state)| (name.as_str(), state.is_ok())).collect();
    assert_eq!(states, [("a", true), ("b", false), ("c", true), ("stray", false)]);
}

#[test]
fn a_name_cannot_leave_its_folder_or_hide_in_it() {
    let state = Path::new("/s");
    assert_eq!(named(state, "before-1.2_x").unwrap(), Path::new("/s/checkpoints/before-1.2_x"));
    for name in ["", ".", "..", ".saving", "a/b", "-x", "a b", "ä", "a\n", &"x".repeat(101)] {
        let error = named(state, name).unwrap_err();
        assert!(matches!(error, CheckpointError::Name { .. }), "{name:?}");
        assert!(!error.to_string().contains('\n'));
    }
}

#[test]
fn a_checkpoint_that_changed_after_it_was_verified_does_not_touch_the_state() {
    let (dir, path) = saved();
    let checkpoint = Checkpoint::open(&path).unwrap();
    flip(&path.join("journal.db"), 5000);
    let before = ControlDb::open(dir.path()).unwrap().tenants().unwrap();
    let error = checkpoint.put_in_place(dir.path(), NOW).unwrap_err();
    assert!(error.to_string().ends_with("journal.db: its SHA-256 is wrong"), "{error}");
    assert_eq!(finish_restore(dir.path()).unwrap(), None);
    assert_eq!(ControlDb::open(dir.path()).unwrap().tenants().unwrap(), before);
}

#[test]
fn a_start_goes_on_where_putting_in_place_was_cut_off_at_whatever_rename() {
    let (old, control, journal) = state();
    let checkpoint = save(old.path(), "one", &control, &journal);
    let requests = replay(&journal);
    // Files that had been moved before the cut: of the old ones, and of the new ones.
    for (old_moved, new_moved) in [(0, 0), (1, 0), (1, 1), (2, 1), (2, 2)] {
        let dir = tempfile::tempdir().unwrap();
        let (restoring, aside) = (dir.path().join(".restoring"), dir.path().join("before-1"));
        fs::create_dir(&restoring).unwrap();
        fs::create_dir(&aside).unwrap();
        fs::write(restoring.join("aside"), "before-1").unwrap();
        for (i, name) in ["control.db", "journal.db"].into_iter().enumerate() {
            let old = if i < old_moved { &aside } else { dir.path() };
            fs::write(old.join(name), "old").unwrap();
            let new = if i < new_moved { dir.path() } else { &restoring };
            fs::copy(checkpoint.file(name), new.join(name)).unwrap();
        }
        assert_eq!(finish_restore(dir.path()).unwrap(), Some(aside.clone()));
        assert_eq!(replay(&JournalDb::open(dir.path(), Fsync::Never).unwrap()), requests);
        let placed = ControlDb::open(dir.path()).unwrap();
        assert_eq!(placed.installation_secret(), control.installation_secret());
        for name in ["control.db", "journal.db"] {
            assert_eq!(fs::read_to_string(aside.join(name)).unwrap(), "old");
        }
        assert!(!restoring.exists());
    }
}
