//! What tests of the journal share: requests by number, and a journal in memory that is simple enough to be right.

#![allow(dead_code, reason = "each test file uses its part")]

use std::collections::BTreeMap;
use std::sync::Arc;

use pagedd_core::{RequestId, SamplingParams, TenantId};
use pagedd_journal::{
    Admission, Entry, Finish, Idempotency, JournalDb, Kept, OnLeave, Record, SavedRequest, Step,
};

pub const NOW: u64 = 1_790_000_000;

pub fn id(n: u64) -> RequestId {
    RequestId(u128::from(n).wrapping_mul(0x9E37_79B9_7F4A_7C15_F39C_C060_5CED_C835).to_be_bytes())
}

/// Request `n` of a tenant: two choices.
pub fn admission(n: u64, tenant: u32) -> Admission {
    Admission {
        request: id(n),
        tenant: TenantId(tenant),
        idempotency: n.is_multiple_of(3).then_some(Idempotency { key: [n as u8; 32], body: [7; 32] }),
        model_digest: n.is_multiple_of(2).then_some([n as u8; 16]),
        saved: SavedRequest {
            model: "smollm2".to_owned(),
            key: Some(3),
            created_unix: NOW + n,
            on_leave: OnLeave::RunOn,
            prompt: (0..5 + n as u32 % 300).map(|i| i * 31 + n as u32).collect(),
            sampling: SamplingParams { temperature: 0.5, seed: n, ..SamplingParams::GREEDY }.into(),
            n: 2,
            max_tokens: 100,
            stop_ids: vec![2],
            context: format!("context of {n}").into_bytes(),
        },
    }
}

pub fn admit(n: u64, tenant: u32) -> Record {
    Record::Admission(Arc::new(admission(n, tenant)))
}

pub fn step(entries: impl IntoIterator<Item = (u64, Entry)>) -> Record {
    let entries = entries.into_iter().map(|(n, entry)| (id(n), entry)).collect();
    Record::Step(Step { entries, ..Step::default() })
}

pub fn start(n: u64, cached_tokens: u32) -> Record {
    Record::Step(Step { started: vec![(id(n), cached_tokens)], ..Step::default() })
}

pub const fn token(choice: u32, token: u32) -> Entry {
    Entry::Token { choice, token }
}

pub const fn finish(choice: u32) -> Entry {
    Entry::Finish { choice, reason: Finish::Stop }
}

pub const END: Entry = Entry::End { cached_tokens: 4 };

/// Everything that is kept and whole, in order.
pub fn replay(db: &JournalDb) -> Vec<Kept> {
    let mut all = Vec::new();
    db.replay(|found| all.push(found.expect("nothing is damaged"))).unwrap();
    all
}

/// What a journal should hold.
#[derive(Clone, Default, Debug, PartialEq)]
pub struct Model {
    pub requests: Vec<Kept>,
}

impl Model {
    pub fn append(&mut self, batch: &[Record], now_unix: u64) {
        for record in batch {
            match record {
                Record::Admission(admission) => self.requests.push(Kept {
                    admission: (**admission).clone(),
                    entries: Vec::new(),
                    finished_unix: None,
                    replays: 0,
                    cached_tokens: None,
                }),
                Record::Step(step) => {
                    for (request, cached_tokens) in &step.started {
                        let kept = self.requests.iter_mut().find(|k| k.admission.request == *request);
                        if let Some(kept) = kept.filter(|k| k.finished_unix.is_none()) {
                            kept.cached_tokens = Some(*cached_tokens);
                        }
                    }
                    for (request, entry) in &step.entries {
                        let kept = self.requests.iter_mut().find(|k| k.admission.request == *request);
                        if let Some(kept) = kept.filter(|k| k.finished_unix.is_none()) {
                            kept.entries.push(*entry);
                            if matches!(entry, Entry::End { .. }) {
                                kept.finished_unix = Some(now_unix);
                            }
                        }
                    }
                }
            }
        }
    }

    pub fn expire(&mut self, now_unix: u64, seconds: u64, per_tenant: &BTreeMap<TenantId, u64>) {
        self.requests.retain(|kept| {
            let seconds = per_tenant.get(&kept.admission.tenant).unwrap_or(&seconds);
            kept.finished_unix.is_none_or(|at| at + seconds > now_unix)
        });
    }
}
