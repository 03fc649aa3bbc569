//! Checkpoints, from the command line to the daemon and back.

use super::*;

fn checkpoint() -> CheckpointInfo {
    let model = CheckpointModel {
        name: "smollm2".to_owned(),
        architecture: "llama".to_owned(),
        dtype: "auto".to_owned(),
        kv_dtype: "f16".to_owned(),
        kernels: "avx2".to_owned(),
        digest: "00ff".to_owned(),
        block_size: 16,
        block_bytes: 360 << 10,
        blocks: 12,
        kv: true,
    };
    CheckpointInfo {
        name: "one".to_owned(),
        path: "/s/checkpoints/one".to_owned(),
        created_unix: 1_790_000_000,
        pagedd: "0.1.0".to_owned(),
        bytes: 5 << 20,
        models: vec![model],
    }
}

fn asks(line: &str, reply: Reply) -> (CheckpointCommand, String) {
    let (Command::Checkpoint(command), text) = done(line, reply) else { panic!("{line}") };
    (command, text)
}

#[test]
fn checkpoint_save_says_what_was_written_and_names_it_by_the_time_if_it_must() {
    let (command, text) = asks("checkpoint save one --kv", Reply::CheckpointSaved(checkpoint()));
    assert_eq!(command, CheckpointCommand::Save(CheckpointSave { name: "one".to_owned(), kv: true }));
    assert_eq!(
        text,
        "\
checkpoint  one
path        /s/checkpoints/one
created     2026-09-21 14:13:20 UTC
pagedd      0.1.0
size        5.0MiB
kv blocks   12, saved

take it up with `pagedctl checkpoint restore one`
"
    );
    let (command, _) = asks("checkpoint save", Reply::CheckpointSaved(checkpoint()));
    let CheckpointCommand::Save(CheckpointSave { name, kv: false }) = command else { panic!("{command:?}") };
    assert_eq!(name.len(), 15, "{name}");
    assert!(
        name.chars().enumerate().all(|(i, c)| if i == 8 { c == '-' } else { c.is_ascii_digit() }),
        "{name}"
    );
}

#[test]
fn checkpoint_list_tells_damaged_ones_apart() {
    let listing = |name: &str, state| CheckpointListing { name: name.to_owned(), state };
    let error = "kv-smollm2: it is missing".to_owned();
    let checkpoints = vec![
        listing("one", CheckpointState::Complete(checkpoint())),
        listing("two", CheckpointState::Damaged { error }),
    ];
    let (command, text) = asks("checkpoint list", Reply::Checkpoints(CheckpointListed { checkpoints }));
    assert_eq!(command, CheckpointCommand::List);
    assert_eq!(
        text,
        "\
CHECKPOINT  CREATED                  PAGEDD    SIZE  BLOCKS  KV   STATE
one         2026-09-21 14:13:20 UTC  0.1.0   5.0MiB      12  yes  complete
two         -                        -            -       -  -    damaged: kv-smollm2: it is missing
"
    );
}

#[test]
fn checkpoint_inspect_shows_models_tenants_and_files() {
    let tenant = CheckpointTenant {
        id: 1,
        name: "acme".to_owned(),
        model: "smollm2".to_owned(),
        keys: 2,
        live: 3,
        prompt_tokens: 400,
        output_tokens: 50,
        ended: 6,
    };
    let shown = CheckpointShown {
        checkpoint: checkpoint(),
        files: vec![CheckpointFile { name: "control.db".to_owned(), bytes: 40_960 }],
        tenants: vec![tenant],
        damaged_requests: 1,
    };
    let (command, text) = asks("checkpoint inspect one", Reply::Checkpoint(shown));
    assert_eq!(command, CheckpointCommand::Inspect(CheckpointAt { which: "one".to_owned() }));
    for line in [
        "damaged     1 requests cannot be read",
        "smollm2  llama         auto   f16       avx2     16 tokens, 360.0KiB      12  00ff",
        "acme    smollm2     2     3            400             50      6",
        "control.db  40.0KiB",
    ] {
        assert!(text.lines().any(|found| found == line), "{line:?} is not in:\n{text}");
    }
}

#[test]
fn checkpoint_verify_and_restore_take_names_and_paths() {
    let (command, text) = asks("checkpoint verify one", Reply::CheckpointWhole(checkpoint()));
    assert_eq!(command, CheckpointCommand::Verify(CheckpointAt { which: "one".to_owned() }));
    assert_eq!(text, "checkpoint one is whole: 5.0MiB were read\n");
    let restoring = CheckpointRestoring { checkpoint: checkpoint(), state_dir: "/s".to_owned() };
    let (command, text) = asks("checkpoint restore ./one", Reply::CheckpointRestoring(restoring));
    let which = std::env::current_dir().unwrap().join("one").display().to_string();
    assert_eq!(command, CheckpointCommand::Restore(CheckpointAt { which }));
    assert!(text.starts_with("pagedd starts anew from checkpoint one\n"), "{text}");
}
