//! The scheduler's guesses on real models: what is drawn is what is drawn without them, bit for bit.

use std::collections::BTreeMap;

use pagedd_core::{
    Blocks, FinishReason, Penalties, RequestId, SamplingParams, StepCost, TenantId, TensorType, TokenId,
    Tokens,
};
use pagedd_model::testing::TinyModel;
use pagedd_sched::{
    Applied, NewRequest, PolicyKind, Sampled, Scheduler, SchedulerConfig, SequenceSnapshot, ShareSpec,
    StepOutput, StepPlan,
};
use pagedd_wire::worker::{
    Arena, Begin, BlockCopy, Dtype, Hello, Input, KvMemory, Output, Plan, Row, SequenceState, TableUpdate,
};
use pagedd_worker::ModelRunner;

use crate::models::{hello, load, load_real, tiny, tokens};

const TENANT: TenantId = TenantId(1);

fn plan(plan: &StepPlan) -> Plan {
    let blocks = |ids: &[pagedd_core::BlockId]| ids.iter().map(|block| block.0).collect();
    let input = |input: &pagedd_sched::Input| match *input {
        pagedd_sched::Input::Known(token) => Input::Known(token.0),
        pagedd_sched::Input::Sampled { plan, seq } => Input::Sampled { plan: plan.0, seq: seq.0 },
    };
    let begin = plan.begin.iter();
    let copies = plan.copies.iter();
    let rows = plan.rows.iter();
    Plan {
        id: plan.id.0,
        begin: begin
            .map(|b| Begin {
                seq: b.seq.0,
                choice: b.choice,
                sampling: b.sampling.into(),
                prompt: b.prompt.0,
                tokens: b.tokens.iter().map(|token| token.0).collect(),
            })
            .collect(),
        copies: copies.map(|c| BlockCopy { from: c.from.0, to: c.to.0, tokens: c.tokens.0 }).collect(),
        rows: rows
            .map(|row| Row {
                seq: row.seq.0,
                start: row.start.0,
                inputs: row.inputs.iter().map(input).collect(),
                table: TableUpdate { from: row.table.from, blocks: blocks(&row.table.blocks) },
                samples: row.samples.iter().map(|seq| seq.0).collect(),
                drafts: row.drafts,
            })
            .collect(),
        end: plan.end.iter().map(|seq| seq.0).collect(),
    }
}

fn output(plan: &StepPlan, output: Output) -> StepOutput {
    assert_eq!(output.failed, []);
    let sampled = output.sampled.into_iter().map(|s| Sampled {
        seq: pagedd_core::SequenceId(s.seq),
        token: TokenId(s.token),
        logprob: s.logprob,
        top: s.top.into_iter().map(|(token, logprob)| (TokenId(token), logprob)).collect(),
    });
    StepOutput { plan: plan.id, sampled: sampled.collect(), failed: Vec::new(), compute_us: 0 }
}

fn state(snapshot: &SequenceSnapshot) -> SequenceState {
    SequenceState {
        seq: snapshot.seq.0,
        choice: snapshot.choice,
        sampling: snapshot.sampling.into(),
        tokens: snapshot.tokens.iter().map(|token| token.0).collect(),
        prompt: snapshot.prompt.0,
        blocks: snapshot.blocks.iter().map(|block| block.0).collect(),
    }
}

/// A token with its log-probability and the best tokens, as bits.
type Bits = (u32, Option<u32>, Vec<(u32, u32)>);

/// By request and choice: what it gave, and its end.
type Outputs = BTreeMap<(RequestId, u32), (Vec<Bits>, Option<FinishReason>)>;

/// What the scheduler counted.
#[derive(Debug)]
struct Counts {
    steps: u64,
    tried: u64,
    right: u64,
    preemptions: u64,
    cached: u64,
}

/// Runs requests to their ends, some of them from the start and the others one in every third step.
struct Run<'a> {
    runner: &'a mut ModelRunner,
    prompt_lookup: bool,
    /// Whether plans run twice, and workers forget what they know.
    deaths: bool,
    blocks: u32,
}

impl Run<'_> {
    fn of(mut self, requests: &[NewRequest]) -> (Outputs, Counts) {
        let limits = *self.runner.limits();
        let mut scheduler = Scheduler::new(SchedulerConfig {
            block_size: Tokens(limits.block_size),
            capacity: Blocks(self.blocks),
            max_num_seqs: 8,
            max_num_batched_tokens: Tokens(64),
            max_model_len: Tokens(limits.max_model_len),
            max_queued_requests: 100,
            policy: PolicyKind::Fcfs,
            cache_key: [1; 32],
            weight_digest: [2; 16],
            prefix_cache: true,
            prompt_lookup: self.prompt_lookup,
            max_drafts: 64,
            // Tokens cost nothing: whatever can be guessed is tried.
            cost: StepCost { body_us: [1.0; StepCost::SIZES.len()], ..StepCost::UNKNOWN },
            itl_target_us: None,
        });
        scheduler.set_share(TENANT, ShareSpec { floor: Blocks(0), ceiling: Blocks(self.blocks) }).unwrap();
        let mut waiting = requests.iter().cloned();
        for request in waiting.by_ref().take(3) {
            scheduler.admit(request).unwrap();
        }
        let (mut outputs, mut steps) = (Outputs::new(), 0);
        loop {
            if steps % 3 == 2
                && let Some(request) = waiting.next()
            {
                scheduler.admit(request).unwrap();
            }
            let Some(step) = scheduler.schedule(0) else { break };
            let given = self.runner.run(&plan(&step)).unwrap();
            if self.deaths {
                self.again(&scheduler, &step, &given, steps);
            }
            note(&mut outputs, scheduler.apply(step.clone(), output(&step, given)));
            scheduler.check().unwrap();
            steps += 1;
        }
        assert!(scheduler.is_idle());
        let stats = scheduler.stats().tenants[0];
        assert_eq!(stats.held, Blocks(0));
        let counts = Counts {
            steps,
            tried: stats.draft_tokens,
            right: stats.draft_tokens_accepted,
            preemptions: stats.preemptions,
            cached: stats.prefix_hit_tokens,
        };
        (outputs, counts)
    }

    /// The plan once more, now and then to a worker that was told the state anew.
    fn again(&mut self, scheduler: &Scheduler, step: &StepPlan, given: &Output, steps: u64) {
        let before = self.runner.data(Arena::Kv).to_vec();
        if steps % 4 == 1 {
            self.runner.resync(scheduler.snapshot().iter().map(state).collect()).unwrap();
        }
        let again = self.runner.run(&plan(step)).unwrap();
        assert_eq!(Output { compute_us: 0, ..again }, Output { compute_us: 0, ..given.clone() });
        assert!(before == self.runner.data(Arena::Kv), "plan {} left another arena", step.id);
    }
}

fn note(outputs: &mut Outputs, applied: Applied) {
    for token in applied.tokens {
        let top = token.top.iter().map(|(token, logprob)| (token.0, logprob.to_bits())).collect();
        let bits = (token.token.0, token.logprob.map(f32::to_bits), top);
        let (tokens, end) = outputs.entry((token.request, token.choice)).or_default();
        assert_eq!(*end, None, "a token after the end");
        tokens.push(bits);
    }
    for finished in applied.finished {
        let (_, end) = outputs.entry((finished.request, finished.choice)).or_default();
        assert_eq!(end.replace(finished.reason), None, "an end after the end");
    }
}

/// Requests of every kind, of which some share the start of their prompts.
fn requests(vocab: u32, most: u32) -> Vec<NewRequest> {
    let request = |number: u64| {
        let mut prompt = tokens(number % 3, 40, vocab);
        // A text that says things twice.
        prompt.extend(tokens(number, 12, vocab).repeat(2));
        let sampling = match number % 4 {
            0 | 1 => SamplingParams::GREEDY,
            2 => SamplingParams { temperature: 0.3, ..SamplingParams::GREEDY },
            _ => SamplingParams { temperature: 0.8, top_p: 0.7, ..SamplingParams::GREEDY },
        };
        // Small ones, so that texts still say things twice.
        let penalties = match number % 3 {
            0 => Penalties { presence: 0.1, frequency: 0.02, repetition: 1.01 },
            _ => Penalties::NONE,
        };
        NewRequest {
            id: RequestId(u128::from(number).to_be_bytes()),
            tenant: TENANT,
            prompt: prompt.into_iter().map(TokenId).collect(),
            n: if number % 5 == 4 { 3 } else { 1 },
            max_tokens: Tokens(most - number as u32 % 7),
            stop_ids: Vec::new(),
            sampling: SamplingParams { seed: number, logprobs: Some(3), penalties, ..sampling },
        }
    };
    (0..10).map(request).collect()
}

/// Compares runs with and without guesses, as `ways` say: where workers die, and where the pool is too small for all.
fn compare(name: &str, mut runner: ModelRunner, most: u32, ways: &[(bool, bool)]) -> Counts {
    let vocab = runner.info().vocab_size;
    let mut requests = requests(vocab, most);
    let blocks = 400;
    let mut run = |prompt_lookup, deaths, blocks, requests: &[NewRequest]| {
        runner.resync(Vec::new()).unwrap();
        Run { runner: &mut runner, prompt_lookup, deaths, blocks }.of(requests)
    };
    let (plain, _) = run(false, false, blocks, &requests);
    // Every other request now stops at a token that it said in the middle.
    for request in requests.iter_mut().step_by(2) {
        let (tokens, _) = &plain[&(request.id, 0)];
        request.stop_ids = vec![TokenId(tokens[tokens.len() / 2].0)];
    }
    let (plain, counts) = run(false, false, blocks, &requests);
    assert_eq!((counts.tried, plain.len()), (0, 14), "{name}: {counts:?}");
    let stopped = plain.values().filter(|(_, end)| *end == Some(FinishReason::Stop)).count();
    assert!(stopped >= 5, "{name}: {stopped} stopped");
    // Blocks for two requests at their full length: the others are preempted.
    let few = (64 + most) / 16 * 3;
    let (steps, mut last) = (counts.steps, counts);
    for &(deaths, crowded) in ways {
        let blocks = if crowded { few } else { blocks };
        let (guessed, counts) = run(true, deaths, blocks, &requests);
        assert!(plain == guessed, "{name}: guesses changed an output, deaths {deaths}, {blocks} blocks");
        assert!(counts.right > 20 && counts.tried > counts.right, "{name}: {counts:?}");
        assert!(counts.cached > 0, "{name}: {counts:?}");
        if crowded {
            assert!(counts.preemptions > 0, "{name}: {counts:?}");
        } else {
            assert!(counts.steps < steps, "{name}: {counts:?} against {steps} steps");
        }
        last = counts;
    }
    last
}

#[test]
fn guesses_change_no_token_and_no_bit_of_tiny_models() {
    for ty in [TensorType::F32, TensorType::F16, TensorType::Q4_1, TensorType::Q6_K, TensorType::Q8_0] {
        let (_dir, path) = tiny(&TinyModel::of_type(ty));
        let hello = Hello { kv_memory: KvMemory::Tokens(6400), ..hello(&path, Dtype::Auto) };
        let ways = [(false, false), (true, false), (false, true), (true, true)];
        let counts = compare(&format!("{ty:?}"), load(&hello), 90, &ways);
        println!("{ty:?}: {counts:?}");
    }
}

#[test]
fn guesses_change_no_token_and_no_bit_of_the_real_model() {
    let runner = load_real(Dtype::Auto, |hello| hello.kv_memory = KvMemory::Tokens(6400));
    let counts = compare("SmolLM2", runner, 32, &[(false, false), (true, true)]);
    println!("{counts:?}");
}
