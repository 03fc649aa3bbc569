//! What tenants' clients see: answers of the real model, each tenant's on its own port.

use std::path::Path;
use std::thread;
use std::time::Duration;

use pagedd_tests::daemon::{Site, Tenant, free_ports, model_yaml, smollm2_f32_yaml, smollm2_yaml};
use pagedd_tests::http::{Client, Event, whole_text};
use pagedd_tests::model::{reference, references, smollm2};
use pagedd_tests::process::kill_descendant;
use pagedd_tests::wait;
use serde_json::{Value, json};

const LONG_PROMPT: &str = "Once upon a time, in a small village at the foot of a tall mountain, there lived an old clockmaker \
    who had never once been late in his life. Every morning he wound the clock of the village church, and every evening";

fn chat(question: &str, max_tokens: u32) -> Value {
    json!({"model": "smollm2", "messages": [{"role": "user", "content": question}], "max_tokens": max_tokens, "temperature": 0})
}

/// A body with further fields.
fn with(mut body: Value, more: &Value) -> Value {
    let fields = more.as_object().expect("an object").clone();
    body.as_object_mut().expect("an object").extend(fields);
    body
}

fn content(answer: &Value) -> String {
    answer["choices"][0]["message"]["content"]
        .as_str()
        .unwrap_or_else(|| panic!("no content: {answer}"))
        .to_owned()
}

#[test]
fn two_tenants_chat_on_their_own_ports_and_a_key_opens_only_its_own() {
    let daemon = Site::new(&smollm2_yaml()).start();
    let acme = daemon.add_tenant("acme", "20%", "50%");
    let globex = daemon.add_tenant("globex", "20%", "100%");

    for tenant in [&acme, &globex] {
        let models = tenant.http.get("/v1/models").ok();
        assert_eq!(models["data"][0]["id"], "smollm2", "{models}");
        let body = chat("What is gravity? Answer in two sentences.", 24);
        let answer = tenant.http.post("/v1/chat/completions", &body).ok();
        let text = content(&answer);
        assert!(text.split_whitespace().count() > 5, "{text:?}");
        let events =
            tenant.http.stream("/v1/chat/completions", &[], &with(body, &json!({"stream": true}))).events();
        assert_eq!(whole_text(events), text, "streamed and whole differ");
    }

    for (asked, key) in [
        (&acme, None),
        (&acme, Some(globex.key.as_str())),
        (&globex, Some(acme.key.as_str())),
        (&acme, Some("x")),
    ] {
        let client = asked.http.with_key(key);
        for answer in [client.get("/v1/models"), client.post("/v1/chat/completions", &chat("Hello", 4))] {
            let error = answer.error(401);
            assert!(
                !error.to_string().contains(&acme.key) && !error.to_string().contains(&globex.key),
                "{error}"
            );
        }
    }
    for path in ["/livez", "/readyz", "/health/decode"] {
        let answer = acme.http.with_key(None).get(path);
        assert_eq!(answer.status, 200, "{path}: {}", answer.text());
    }
    daemon.stop();
}

#[test]
fn an_open_tenant_needs_no_key() {
    let daemon = Site::new(&smollm2_yaml()).start();
    let [port] = free_ports();
    let answer = daemon.ask(&["tenant", "add", "open", "--port", &port.to_string(), "--no-auth"]);
    assert!(answer["key"].is_null(), "{answer}");
    let client = Client::new(port, None);
    wait::until("the port is ready", Duration::from_secs(10), || client.get("/readyz").status == 200);
    assert_eq!(client.post("/v1/chat/completions", &chat("Hello", 2)).status, 200);
}

#[test]
fn greedy_text_in_float32_equals_the_reference() {
    let daemon = Site::new(&smollm2_f32_yaml()).start();
    let tenant = daemon.add_tenant("acme", "0%", "100%");
    for reference in references() {
        let fields = json!({"model": "smollm2", "temperature": 0, "max_tokens": 48});
        let answer = match &reference.messages {
            Some(messages) => {
                tenant.http.post("/v1/chat/completions", &with(fields, &json!({"messages": messages}))).ok()
            }
            None => tenant
                .http
                .post("/v1/completions", &with(fields, &json!({"prompt": reference.templated})))
                .ok(),
        };
        let choice = &answer["choices"][0];
        let text = choice["message"]["content"].as_str().or(choice["text"].as_str()).unwrap_or_default();
        // Text cut inside of a character ends with a replacement character on either side.
        assert_eq!(text, reference.text, "{}", reference.id);
        assert_eq!(
            choice["finish_reason"],
            if reference.stopped { "stop" } else { "length" },
            "{}",
            reference.id
        );
        assert_eq!(answer["usage"]["prompt_tokens"], reference.prompt_tokens, "{}", reference.id);
        let tokens = answer["usage"]["completion_tokens"].as_u64().unwrap_or(0);
        assert!(
            reference.output_tokens - tokens <= u64::from(reference.stopped),
            "{}: {tokens} tokens",
            reference.id
        );
    }
}

/// Sends the target among `others` different requests, all at once; gives the target's text.
fn among_others(tenant: &Tenant, others: u32, prompt: &str, max_tokens: u32) -> String {
    thread::scope(|scope| {
        let noise: Vec<_> = (0..others)
            .map(|i| {
                let prompt =
                    format!("Number {i} of the list of {} things that a traveller needs is", i * 7 + 3);
                scope.spawn(move || tenant.complete(&prompt, 16 + i % 24))
            })
            .collect();
        let text = tenant.complete(prompt, max_tokens);
        for other in noise {
            other.join().expect("another request");
        }
        text
    })
}

#[test]
fn a_greedy_request_gives_one_text_alone_among_31_others_and_on_every_path() {
    let daemon = Site::new(&smollm2_yaml()).start();
    let acme = daemon.add_tenant("acme", "0%", "100%");
    let alone = acme.complete(LONG_PROMPT, 48);
    assert_eq!(acme.complete(LONG_PROMPT, 48), alone, "with its prefix cached");
    for round in 0..2 {
        assert_eq!(among_others(&acme, 31, LONG_PROMPT, 48), alone, "among 31 others, round {round}");
    }
    daemon.stop();

    let options = "kv_memory: 16384 tokens\n    max_model_len: 2048\n    threads: 1\n    prefix_cache: false\n    max_num_batched_tokens: 16";
    let daemon = Site::new(&model_yaml("smollm2", &smollm2(), options)).start();
    let acme = daemon.add_tenant("acme", "0%", "100%");
    assert_eq!(acme.complete(LONG_PROMPT, 48), alone, "with one thread, in chunks of 16, without a cache");
    daemon.stop();

    let options = "kv_memory: 768 tokens\n    max_model_len: 512\n    prefix_cache: false";
    let daemon = Site::new(&model_yaml("smollm2", &smollm2(), options)).start();
    let acme = daemon.add_tenant("acme", "0%", "100%");
    // 48 blocks hold about eight of these: the others are preempted, or wait.
    assert_eq!(among_others(&acme, 20, LONG_PROMPT, 48), alone, "in a pool that is too small for all");
    daemon.wait_idle();
    assert_eq!(daemon.model()["blocks_held"], 0);
}

#[test]
fn a_preempted_request_gives_the_text_it_gives_alone() {
    // Without guesses, with which one request may be over before the others have grown.
    let options =
        "kv_memory: 384 tokens\n    max_model_len: 256\n    prefix_cache: false\n    prompt_lookup: false";
    let daemon = Site::new(&model_yaml("smollm2", &smollm2(), options)).start();
    let acme = daemon.add_tenant("acme", "0%", "100%");
    let prompts = [
        "The first rule of gardening is",
        "A recipe for bread begins with",
        "The history of Rome begins",
        "In the deep sea there",
    ];
    let body = |prompt: &str| json!({"model": "smollm2", "prompt": prompt, "max_tokens": 150, "temperature": 0, "ignore_eos": true});
    let ask = |prompt: &str| {
        acme.http.post("/v1/completions", &body(prompt)).ok()["choices"][0]["text"]
            .as_str()
            .map(str::to_owned)
    };
    let alone: Vec<_> = prompts.iter().map(|p| ask(p)).collect();
    // Each grows to 10 blocks or more; the pool has 24.
    let together: Vec<_> = thread::scope(|scope| {
        let running: Vec<_> = prompts.iter().map(|p| scope.spawn(|| ask(p))).collect();
        running.into_iter().map(|t| t.join().expect("a request")).collect()
    });
    assert_eq!(together, alone);
    let metrics = acme.http.get("/metrics").text();
    let count = metrics
        .lines()
        .find(|l| l.starts_with("pagedd_preemptions_total"))
        .and_then(|l| l.rsplit(' ').next());
    let preempted = count.and_then(|c| c.parse::<f64>().ok()).is_some_and(|c| c > 0.0);
    assert!(preempted, "nothing was preempted:\n{metrics}");
}

fn cached(answer: &Value) -> u64 {
    answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        .as_u64()
        .unwrap_or_else(|| panic!("no cached_tokens: {answer}"))
}

#[test]
fn a_prefix_is_found_again_by_its_tenant_and_by_no_other() {
    let daemon = Site::new(&smollm2_yaml()).start();
    let acme = daemon.add_tenant("acme", "20%", "100%");
    let globex = daemon.add_tenant("globex", "20%", "100%");
    let body = json!({"model": "smollm2", "prompt": LONG_PROMPT, "max_tokens": 4, "temperature": 0});
    let first = acme.http.post("/v1/completions", &body).ok();
    let second = acme.http.post("/v1/completions", &body).ok();
    assert_eq!(cached(&first), 0);
    let prompt = second["usage"]["prompt_tokens"].as_u64().expect("prompt_tokens");
    assert!(cached(&second) >= prompt - 17 && cached(&second).is_multiple_of(16), "{second}");
    assert_eq!(first["choices"], second["choices"]);
    assert_eq!(
        cached(&globex.http.post("/v1/completions", &body).ok()),
        0,
        "another tenant's blocks were used"
    );
    let held = daemon.tenant_info("acme");
    assert!(held["share"]["cached_blocks"].as_u64() > Some(0), "{held}");
}

#[test]
fn bug_17_a_prompt_that_is_cached_whole_computes_its_last_token_again() {
    let daemon = Site::new(&smollm2_yaml()).start();
    let acme = daemon.add_tenant("acme", "0%", "100%");
    // 32 tokens: two full blocks of 16.
    let ids: Vec<u32> = (0..32).map(|i| 400 + i * 37).collect();
    let body = json!({"model": "smollm2", "prompt": ids, "max_tokens": 8, "temperature": 0});
    let first = acme.http.post("/v1/completions", &body).ok();
    for _ in 0..3 {
        let again = acme.http.post("/v1/completions", &body).ok();
        assert_eq!(again["choices"], first["choices"]);
        assert_eq!(again["usage"]["prompt_tokens"], 32);
        assert!((1..=31).contains(&cached(&again)), "{again}");
    }
}

#[test]
fn several_choices_each_end_once_and_a_seed_repeats_them() {
    let daemon = Site::new(&smollm2_yaml()).start();
    let acme = daemon.add_tenant("acme", "0%", "100%");
    let body =
        with(chat("Name an animal.", 12), &json!({"n": 3, "temperature": 0.9, "top_p": 0.95, "seed": 7}));
    let first = acme.http.post("/v1/chat/completions", &body).ok();
    let texts = |answer: &Value| -> Vec<String> {
        let choices = answer["choices"].as_array().cloned().unwrap_or_default();
        (0..3u64)
            .map(|i| {
                let mine: Vec<_> = choices.iter().filter(|c| c["index"] == i).collect();
                assert_eq!(mine.len(), 1, "{answer}");
                assert!(mine[0]["finish_reason"].is_string(), "{answer}");
                mine[0]["message"]["content"].as_str().unwrap_or_default().to_owned()
            })
            .collect()
    };
    let first_texts = texts(&first);
    assert_eq!(
        texts(&acme.http.post("/v1/chat/completions", &body).ok()),
        first_texts,
        "the same seed, other texts"
    );
    assert!(first_texts.iter().any(|t| *t != first_texts[0]), "three choices, one text: {first_texts:?}");

    let events: Vec<Event> = acme
        .http
        .stream("/v1/chat/completions", &[], &with(body, &json!({"stream": true})))
        .events()
        .collect();
    let mut streamed = vec![String::new(); 3];
    let mut ends = [0; 3];
    for value in events.iter().filter(|e| e.data != "[DONE]").map(Event::json) {
        for choice in value["choices"].as_array().into_iter().flatten() {
            let index = choice["index"].as_u64().expect("index") as usize;
            streamed[index].push_str(choice["delta"]["content"].as_str().unwrap_or(""));
            ends[index] += u32::from(choice["finish_reason"].is_string());
        }
    }
    assert_eq!((streamed, ends), (first_texts, [1; 3]));
    assert_eq!(events.last().map(|e| e.data.as_str()), Some("[DONE]"));
    daemon.wait_idle();
    assert_eq!(daemon.model()["blocks_held"], 0);
}

#[test]
fn a_stop_string_ends_the_text_before_itself_streamed_or_not() {
    let daemon = Site::new(&smollm2_f32_yaml()).start();
    let acme = daemon.add_tenant("acme", "0%", "100%");
    let reference = reference("raw_ascii");
    // Two tokens make up the line breaks; `: 2018` lies across four.
    for stop in ["\n\n", "swer is: 20", "."] {
        let before = reference.text.split(stop).next().expect("a part");
        let body = json!({"model": "smollm2", "prompt": reference.templated, "max_tokens": 48, "temperature": 0, "stop": [stop]});
        let answer = acme.http.post("/v1/completions", &body).ok();
        assert_eq!(answer["choices"][0]["text"], before, "{stop:?}");
        assert_eq!(answer["choices"][0]["finish_reason"], "stop", "{stop:?}");
        let events = acme.http.stream("/v1/completions", &[], &with(body, &json!({"stream": true}))).events();
        assert_eq!(whole_text(events), before, "{stop:?}, streamed");
    }
    daemon.wait_idle();
    assert_eq!(daemon.model()["blocks_held"], 0);
}

#[test]
fn usage_counts_tokens_and_ignore_eos_runs_to_max_tokens() {
    let daemon = Site::new(&smollm2_f32_yaml()).start();
    let acme = daemon.add_tenant("acme", "0%", "100%");
    let reference = reference("raw_ascii");
    let body = json!({"model": "smollm2", "prompt": reference.templated, "max_tokens": 40, "temperature": 0, "ignore_eos": true});
    let answer = acme.http.post("/v1/completions", &body).ok();
    assert_eq!(answer["choices"][0]["finish_reason"], "length", "{answer}");
    let (prompt, output) = (reference.prompt_tokens, 40);
    let counts = |usage: &Value| {
        (usage["prompt_tokens"].as_u64(), usage["completion_tokens"].as_u64(), usage["total_tokens"].as_u64())
    };
    assert_eq!(counts(&answer["usage"]), (Some(prompt), Some(output), Some(prompt + output)));

    for (options, expected) in
        [(json!({"include_usage": true}), true), (json!({"include_usage": false}), false), (json!({}), false)]
    {
        let body = with(body.clone(), &json!({"stream": true, "stream_options": options}));
        let events: Vec<Event> = acme.http.stream("/v1/completions", &[], &body).events().collect();
        let values: Vec<Value> = events.iter().filter(|e| e.data != "[DONE]").map(Event::json).collect();
        let (last, others) = values.split_last().expect("events");
        assert!(others.iter().all(|v| v["usage"].is_null()), "{others:#?}");
        let reported = last["choices"].as_array().is_some_and(Vec::is_empty)
            && counts(&last["usage"]) == (Some(prompt), Some(output), Some(prompt + output));
        assert_eq!(reported, expected, "{options}: {last}");
    }
}

#[test]
fn metrics_have_the_names_that_dashboards_ask_for() {
    let daemon = Site::new(&smollm2_yaml()).start();
    let acme = daemon.add_tenant("acme", "20%", "50%");
    acme.complete("Hello", 2);
    let of_daemon = daemon.ask(&["metrics"]);
    let text = of_daemon["text"].as_str().map_or_else(|| of_daemon.to_string(), str::to_owned);
    for name in [
        "kv_cache_utilization",
        "blocks_used",
        "blocks_free",
        "scheduler_running_requests",
        "pagedd_",
        "pagedd_draft_tokens_total{",
        "pagedd_draft_tokens_accepted_total{",
        "vllm:",
        "vllm:spec_decode_num_draft_tokens_total{",
        "vllm:spec_decode_num_accepted_tokens_total{",
    ] {
        assert!(text.lines().any(|l| l.starts_with(name)), "no metric {name}:\n{text}");
    }
    let running = text.lines().find(|l| l.starts_with("scheduler_running_requests")).unwrap_or_default();
    assert!(running.contains("device=\""), "{running}");
    let of_tenant = acme.http.get("/metrics").text();
    assert!(of_tenant.contains("pagedd_") && of_tenant.contains("vllm:"), "{of_tenant}");
    assert!(!of_tenant.contains("globex"), "{of_tenant}");
}

#[test]
fn a_log_that_cannot_be_written_ends_no_process() {
    let daemon = Site::new(&smollm2_yaml()).with_log_to(Path::new("/dev/full")).start();
    let processes = |name: &str| -> Vec<u32> {
        daemon.processes().iter().filter(|p| p.name == name).map(|p| p.pid).collect()
    };
    let acme = daemon.add_tenant("acme", "0%", "100%");
    let text = acme.complete("Once upon a time", 8);
    let (daemons, gateways) = (processes("pagedd"), processes("gw:acme"));
    // Its death and the next one's start have lines in the log of each process around it.
    kill_descendant(daemon.root(), processes("pagedd-worker")[0]);
    assert_eq!(acme.complete("Once upon a time", 8), text);
    assert_eq!((processes("pagedd"), processes("gw:acme")), (daemons, gateways));
    daemon.stop();
}
