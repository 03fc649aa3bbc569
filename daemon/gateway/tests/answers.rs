//! What a client sees of an answer: shapes, streams, choices, usage, stop strings, errors.

mod common;

use common::client::{events, get, post, post_with, request, text_of};
use common::{Options, Script, Server, closed, log_of, tokens_of, welcome};
use pagedd_model::testing::GgufValue;
use pagedd_wire::gateway::{
    Closed, Entry, Finish, OnLeave, Rate, Rates, Refusal, ToDaemon, ToGateway, Welcome,
};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

fn saying(answer: &'static str) -> Server {
    let options = Options::default();
    let text = options.text.clone();
    Server::start(options, move |_| Script::Log(log_of(&text, answer)))
}

fn chat(fields: &str) -> String {
    format!(r#"{{"model":"tiny","messages":[{{"role":"user","content":"hello"}}]{fields}}}"#)
}

fn completion(fields: &str) -> String {
    format!(r#"{{"model":"tiny","prompt":"hello"{fields}}}"#)
}

#[test]
fn a_chat_answer_comes_whole() {
    let server = saying("hi 🤣");
    let response = post(server.address, CHAT, &chat(""));
    let answer = response.json();
    assert_eq!(response.status, 200);
    let id = response.header("pagedd-request-id").unwrap();
    assert_eq!(answer["id"], format!("chatcmpl-{id}"));
    assert_eq!(answer["object"], "chat.completion");
    assert_eq!(
        answer["choices"][0]["message"],
        json!({"role": "assistant", "content": "hi 🤣", "refusal": null})
    );
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    assert_eq!(answer["usage"]["completion_tokens"], server.text.prompt("hi 🤣").len());
    assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 3);
    let asked = server.daemon.wait_request();
    assert_eq!(asked.stop_ids, server.text.stop_ids());
    assert_eq!(answer["usage"]["prompt_tokens"], asked.prompt.len());
    assert_eq!((asked.on_leave, asked.n, asked.key), (OnLeave::Cancel, 1, None));
    // The rest of the context, since the operator set no default.
    assert_eq!(asked.max_tokens as usize, 512 - asked.prompt.len());
}

#[test]
fn bug_10_finish_reason_is_null_until_the_last_chunk_of_a_stream() {
    let server = saying("abc");
    let response = post(server.address, CHAT, &chat(r#","stream":true"#));
    assert_eq!(response.header("content-type"), Some("text/event-stream; charset=utf-8"));
    let events = events(&response.body);
    let reasons: Vec<&Value> = events
        .iter()
        .filter_map(|e| e.data.as_ref())
        .map(|data| &data["choices"][0]["finish_reason"])
        .collect();
    assert_eq!(reasons, [&Value::Null, &Value::Null, &Value::Null, &json!("stop")]);
    assert_eq!(
        events.iter().map(|event| event.id).collect::<Vec<_>>(),
        [Some(1), Some(2), Some(3), Some(4), None]
    );
    assert_eq!(events.last().unwrap().data, None);
    let roles: Vec<&Value> = events
        .iter()
        .filter_map(|e| e.data.as_ref())
        .map(|data| &data["choices"][0]["delta"]["role"])
        .collect();
    assert_eq!(roles, [&json!("assistant"), &Value::Null, &Value::Null, &Value::Null]);
    assert_eq!(text_of(&events, 0), "abc");
}

#[test]
fn bug_7_an_emoji_of_four_tokens_arrives_in_one_event() {
    let server = saying("a🤣你好");
    let response = post(server.address, TEXT, &completion(r#","stream":true"#));
    let events = events(&response.body);
    assert_eq!(text_of(&events, 0), "a🤣你好");
    assert!(!response.body.contains('\u{FFFD}'));
    assert_eq!(
        events.iter().map(|event| event.id).collect::<Vec<_>>(),
        [Some(1), Some(5), Some(8), Some(11), Some(12), None]
    );
}

#[test]
fn bug_9_every_choice_ends_once() {
    let options = Options::default();
    let text = options.text.clone();
    let server = Server::start(options, move |request| {
        let mut entries = Vec::new();
        for choice in 0..request.n {
            entries.extend(tokens_of(&text, choice, "ab"));
        }
        for choice in [1, 0, 2] {
            entries.push(Entry::Finish { choice, reason: Finish::Length });
        }
        entries.push(Entry::End { cached_tokens: 0 });
        Script::Log(entries)
    });
    let response = post(server.address, CHAT, &chat(r#","n":3,"stream":true"#));
    let events = events(&response.body);
    let mut ends = Vec::new();
    for data in events.iter().filter_map(|event| event.data.as_ref()) {
        for choice in data["choices"].as_array().unwrap() {
            if choice["finish_reason"] == "length" {
                ends.push(choice["index"].as_u64().unwrap());
            } else {
                assert!(choice["finish_reason"].is_null());
            }
        }
    }
    assert_eq!(ends, [1, 0, 2]);
    for choice in 0..3 {
        assert_eq!(text_of(&events, choice), "ab");
    }
    let whole = post(server.address, CHAT, &chat(r#","n":3"#)).json();
    assert_eq!(whole["choices"].as_array().unwrap().len(), 3);
    assert_eq!(whole["usage"]["completion_tokens"], 6);
}

#[test]
fn bug_11_usage_comes_last_and_only_where_it_was_asked_for() {
    let server = saying("ab");
    for (fields, wanted) in [
        (r#","stream":true"#, false),
        (r#","stream":true,"stream_options":{}"#, false),
        (r#","stream":true,"stream_options":{"include_usage":false}"#, false),
        (r#","stream":true,"stream_options":{"include_usage":true}"#, true),
    ] {
        for (path, body) in [(CHAT, chat(fields)), (TEXT, completion(fields))] {
            let response = post(server.address, path, &body);
            let events = events(&response.body);
            let data: Vec<&Value> = events.iter().filter_map(|event| event.data.as_ref()).collect();
            assert_eq!(response.body.contains("usage"), wanted, "{fields}");
            let with_usage: Vec<bool> = data.iter().map(|data| !data["usage"].is_null()).collect();
            if wanted {
                assert_eq!(with_usage, [false, false, false, true]);
                assert_eq!(data[3]["choices"], json!([]));
                assert_eq!(data[3]["usage"]["completion_tokens"], 2);
                assert_eq!(events[3].id, Some(4));
            } else {
                assert_eq!(with_usage, [false, false, false]);
            }
        }
    }
}

#[test]
fn bug_6_a_stop_string_over_several_tokens_is_cut_out_whole() {
    let server = saying("Yes.\n\nUser: more");
    let fields = r#","stop":["\n\nUser:"],"stream":true"#;
    let response = post(server.address, TEXT, &completion(fields));
    let shown = events(&response.body);
    assert_eq!(text_of(&shown, 0), "Yes.");
    let finishes = response.body.matches(r#""finish_reason":"stop""#).count();
    assert_eq!(finishes, 1, "{}", response.body);
    let whole = post(server.address, TEXT, &completion(r#","stop":"\n\nUser:""#)).json();
    assert_eq!(whole["choices"][0]["text"], "Yes.");
    let used = server.text.prompt("Yes.\n\nUser:").len();
    assert_eq!(whole["usage"]["completion_tokens"], used);
}

#[test]
fn bug_6_the_engine_is_told_of_a_stop_string_while_it_goes_on() {
    let options = Options::default();
    let text = options.text.clone();
    let server = Server::start(options, move |_| Script::Log(log_of(&text, "Yes.END and so on")));
    server.daemon.show(common::Visible::First(9));
    let mut open = common::client::open(
        server.address,
        &request("POST", TEXT, &[], &completion(r#","stop":"END","stream":true"#)),
    );
    let start = open.read_until(r#""finish_reason":"stop""#);
    assert_eq!(text_of(&events(&start), 0), "Yes.");
    server.daemon.wait("a stop", |received| {
        received.iter().any(|frame| matches!(frame, ToDaemon::Stop { choice: 0, .. })).then_some(())
    });
    server.daemon.show(common::Visible::All);
    assert_eq!(open.finish().body, "data: [DONE]\n\n");
}

#[test]
fn a_stop_token_shows_nothing_and_counts() {
    let options = Options::default();
    let text = options.text.clone();
    let server = Server::start(options, move |_| {
        let mut entries = tokens_of(&text, 0, "ab");
        entries.push(Entry::Token { choice: 0, token: text.stop_ids()[0] });
        entries.push(Entry::Finish { choice: 0, reason: Finish::Stop });
        entries.push(Entry::End { cached_tokens: 0 });
        Script::Log(entries)
    });
    let answer = post(server.address, TEXT, &completion("")).json();
    assert_eq!(
        (&answer["choices"][0]["text"], &answer["usage"]["completion_tokens"]),
        (&json!("ab"), &json!(3))
    );
    post(server.address, TEXT, &completion(r#","ignore_eos":true"#));
    assert_eq!(server.daemon.wait_request().stop_ids, Vec::<u32>::new());
}

#[test]
fn bug_14_a_limit_left_out_is_16_for_completions_and_the_operators_for_chats() {
    let options =
        Options { welcome: Welcome { default_max_tokens: Some(40), ..welcome() }, ..Options::default() };
    let text = options.text.clone();
    let server = Server::start(options, move |_| Script::Log(log_of(&text, "a")));
    post(server.address, TEXT, &completion(""));
    assert_eq!(server.daemon.wait_request().max_tokens, 16);
    post(server.address, CHAT, &chat(""));
    assert_eq!(server.daemon.wait_request().max_tokens, 40);
    post(server.address, CHAT, &chat(r#","max_completion_tokens":5"#));
    assert_eq!(server.daemon.wait_request().max_tokens, 5);
    let long = format!(r#"{{"model":"tiny","prompt":{:?}}}"#, vec![1; 505]);
    post(server.address, TEXT, &long);
    assert_eq!(server.daemon.wait_request().max_tokens, 7);
}

#[test]
fn what_is_longer_than_the_context_is_refused_with_the_numbers() {
    let server = saying("a");
    for (prompt, fields) in [(500, r#","max_tokens":13"#), (512, ""), (600, "")] {
        let body = format!(r#"{{"model":"tiny","prompt":{:?}{fields}}}"#, vec![1; prompt]);
        let response = post(server.address, TEXT, &body);
        assert_eq!(response.error(), (400, "prompt".to_owned(), "context_length_exceeded".to_owned()));
        assert!(
            response.body.contains(&prompt.to_string()) && response.body.contains("512"),
            "{}",
            response.body
        );
    }
}

#[test]
fn refusals_of_the_daemon_reach_the_client() {
    for (refusal, status, retry) in [
        (Refusal::NeverFits { needed: 9, allowed: 8, block_size: 16 }, 400, None),
        (Refusal::QueueFull { waiting: 5, retry_after: 7 }, 429, Some("7")),
        (Refusal::Closed(Closed::Draining), 503, Some("5")),
        (Refusal::Closed(Closed::Moved { port: 9 }), 503, Some("1")),
        (Refusal::IdempotencyUnknown { retry_after: 1 }, 503, Some("1")),
        (Refusal::ContextLength { prompt: 5, max_tokens: 5, limit: 8 }, 400, None),
    ] {
        let server = Server::start(Options::default(), move |_| Script::Refuse(refusal.clone()));
        let response = post(server.address, CHAT, &chat(r#","stream":true"#));
        assert_eq!((response.status, response.header("retry-after")), (status, retry));
        assert_eq!(response.header("content-type"), Some("application/json"));
    }
}

#[test]
fn a_quota_that_is_used_up_is_told_as_openai_tells_it() {
    let rates = Rates {
        requests: Some(Rate { limit: 60, remaining: 0, reset_ms: 61_500 }),
        tokens: Some(Rate { limit: 1000, remaining: 17, reset_ms: 350 }),
    };
    let refusal = Refusal::OverQuota {
        quota: "requests_per_minute".to_owned(),
        limit: 60,
        used: 60,
        asked: 1,
        retry_after_ms: 2_001,
        rates,
    };
    let server = Server::start(Options::default(), move |_| Script::Refuse(refusal.clone()));
    let response = post(server.address, CHAT, &chat(""));
    let header = |name: &str| response.header(name).map(str::to_owned);
    assert_eq!((response.status, header("retry-after").as_deref()), (429, Some("3")));
    for (name, value) in [
        ("retry-after-ms", "2001"),
        ("x-ratelimit-limit-requests", "60"),
        ("x-ratelimit-remaining-requests", "0"),
        ("x-ratelimit-reset-requests", "1m2s"),
        ("x-ratelimit-limit-tokens", "1000"),
        ("x-ratelimit-remaining-tokens", "17"),
        ("x-ratelimit-reset-tokens", "350ms"),
    ] {
        assert_eq!(header(name).as_deref(), Some(value), "{name}");
    }
    let error = &response.json()["error"];
    assert_eq!((&error["code"], &error["type"]), (&"rate_limit_exceeded".into(), &"requests".into()));
    let message = error["message"].as_str().unwrap_or_default();
    assert!(message.contains("requests_per_minute") && message.contains("in 3 s"), "{message}");

    let beyond = Refusal::BeyondQuota { quota: "tokens_per_minute".to_owned(), limit: 50, asked: 90 };
    let server = Server::start(Options::default(), move |_| Script::Refuse(beyond.clone()));
    let response = post(server.address, CHAT, &chat(""));
    assert_eq!(response.error(), (400, "messages".to_owned(), "exceeds_quota".to_owned()));
    assert_eq!(response.header("retry-after"), None, "it would be in vain");
    for word in ["tokens_per_minute", "50", "90"] {
        assert!(response.body.contains(word), "{word}: {}", response.body);
    }
}

#[test]
fn a_choice_that_fails_ends_in_an_error_and_the_stream_still_ends() {
    let options = Options::default();
    let text = options.text.clone();
    let server = Server::start(options, move |_| {
        let mut entries = tokens_of(&text, 0, "ab");
        entries.push(Entry::Finish { choice: 0, reason: Finish::Failed });
        entries.push(Entry::End { cached_tokens: 0 });
        Script::Log(entries)
    });
    assert_eq!(post(server.address, CHAT, &chat("")).error().2, "generation_failed");
    let response = post(server.address, CHAT, &chat(r#","stream":true"#));
    assert!(response.body.contains("generation_failed") && response.body.ends_with("data: [DONE]\n\n"));
}

#[test]
fn bug_13_an_empty_prompt_is_refused_or_begins_with_bos() {
    let server = saying("a");
    for body in [
        r#"{"model":"tiny","prompt":""}"#,
        r#"{"model":"tiny","prompt":[]}"#,
        r#"{"model":"tiny","prompt":[""]}"#,
        r#"{"model":"tiny","prompt":[[]]}"#,
    ] {
        assert_eq!(
            post(server.address, TEXT, body).error(),
            (400, "prompt".to_owned(), "invalid_value".to_owned())
        );
    }
    let response = post(server.address, CHAT, r#"{"model":"tiny","messages":[]}"#);
    assert_eq!(response.error(), (400, "messages".to_owned(), "invalid_value".to_owned()));

    let (_directory, path) = common::model(|writer| {
        writer.set("tokenizer.ggml.add_bos_token", GgufValue::Bool(true));
        writer.set("tokenizer.ggml.bos_token_id", GgufValue::U32(pagedd_model::testing::IM_START));
    });
    let text = common::load(&path);
    let options = Options { text: text.clone(), ..Options::default() };
    let server = Server::start(options, move |_| Script::Log(log_of(&text, "a")));
    assert_eq!(post(server.address, TEXT, r#"{"model":"tiny","prompt":""}"#).status, 200);
    assert_eq!(server.daemon.wait_request().prompt, [pagedd_model::testing::IM_START]);
    // The template begins with it already.
    post(server.address, CHAT, &chat(""));
    let prompt = server.daemon.wait_request().prompt;
    assert_ne!(prompt[0], prompt[1], "bug 25: one BOS");
}

#[test]
fn bug_25_a_template_and_a_tokenizer_that_both_add_bos_give_one() {
    let (_directory, path) = common::model(|writer| {
        writer.set("tokenizer.ggml.add_bos_token", GgufValue::Bool(true));
        writer.set("tokenizer.ggml.bos_token_id", GgufValue::U32(264));
        writer.set(
            "tokenizer.chat_template",
            "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}",
        );
    });
    let text = common::load(&path);
    let options = Options { text: text.clone(), ..Options::default() };
    let server = Server::start(options, move |_| Script::Log(log_of(&text, "a")));
    post(server.address, CHAT, &chat(""));
    let prompt = server.daemon.wait_request().prompt;
    assert_eq!(prompt.iter().filter(|token| **token == 264).count(), 1, "{prompt:?}");
    assert_eq!(prompt[0], 264);
}

#[test]
fn bug_24_what_a_chat_template_refuses_is_a_400_in_its_words() {
    let (_directory, path) = common::model(|writer| {
        let template = "{% for m in messages %}{% if loop.index0 % 2 == 1 and m.role == 'user' %}\
                        {{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}";
        writer.set("tokenizer.chat_template", template);
    });
    let text = common::load(&path);
    let options = Options { text: text.clone(), ..Options::default() };
    let server = Server::start(options, move |_| Script::Log(log_of(&text, "a")));
    let body = r#"{"model":"tiny","messages":[{"role":"user","content":"a"},{"role":"user","content":"b"}]}"#;
    let response = post(server.address, CHAT, body);
    assert_eq!(response.error(), (400, "messages".to_owned(), "chat_template_error".to_owned()));
    assert!(response.body.contains("roles must alternate"), "{}", response.body);
}

#[test]
fn bug_29_tokens_outside_the_vocabulary_are_refused() {
    let server = saying("a");
    for prompt in ["[999999]", "[-1]", "[272]"] {
        let response = post(server.address, TEXT, &format!(r#"{{"model":"tiny","prompt":{prompt}}}"#));
        assert_eq!(response.error(), (400, "prompt".to_owned(), "invalid_value".to_owned()), "{prompt}");
    }
    assert_eq!(post(server.address, TEXT, r#"{"model":"tiny","prompt":[271]}"#).status, 200);
}

#[test]
fn control_tokens_in_what_a_client_sends_are_plain_text() {
    let server = saying("a");
    post(server.address, TEXT, r#"{"model":"tiny","prompt":"<|im_end|>"}"#);
    assert!(!server.daemon.wait_request().prompt.contains(&pagedd_model::testing::IM_END));
}

#[test]
fn bug_19_the_same_request_id_twice_gives_two_answers() {
    let server = saying("a");
    let mut ids = Vec::new();
    for _ in 0..2 {
        let response = post_with(server.address, CHAT, &[("X-Request-Id", "mine")], &chat(""));
        assert_eq!((response.status, response.header("x-request-id")), (200, Some("mine")));
        ids.push(response.header("pagedd-request-id").unwrap().to_owned());
    }
    assert_ne!(ids[0], ids[1]);
    let long = "x".repeat(129);
    let response = post_with(server.address, CHAT, &[("X-Request-Id", &long)], &chat(""));
    assert_eq!((response.status, response.header("x-request-id")), (200, None));
}

#[test]
fn bug_28_a_lone_surrogate_is_a_400_that_says_where() {
    let server = saying("a");
    let body = r#"{"model":"tiny","messages":[{"role":"user","content":"\uD800"}]}"#;
    let response = post(server.address, CHAT, body);
    assert_eq!(response.error().0, 400);
    assert!(response.body.contains("at byte "), "{}", response.body);
}

#[test]
fn models_are_listed_and_found_by_name() {
    let server = saying("a");
    let list = get(server.address, "/v1/models").json();
    assert_eq!(list["object"], "list");
    let model = json!({"id": "tiny", "object": "model", "created": 1_700_000_000, "owned_by": "pagedd", "max_model_len": 512});
    assert_eq!(list["data"], json!([model]));
    assert_eq!(get(server.address, "/v1/models/tiny").json(), model);
    assert_eq!(get(server.address, "/v1/models/other").error().2, "model_not_found");
    assert_eq!(post(server.address, TEXT, r#"{"model":"other","prompt":"a"}"#).error().0, 404);
}

#[test]
fn paths_and_methods_that_do_not_exist_are_told_as_openai_errors() {
    let server = saying("a");
    assert_eq!(get(server.address, "/v1/nothing").error().0, 404);
    let response = get(server.address, CHAT);
    assert_eq!((response.error().0, response.header("allow")), (405, Some("POST")));
}

#[test]
fn a_field_without_effect_is_warned_about() {
    let server = saying("a");
    let response = post(server.address, CHAT, &chat(r#","prompt_cache_key":"x""#));
    assert_eq!(response.status, 200);
    assert_eq!(response.header("pagedd-warning"), Some("`prompt_cache_key` has no effect on this server"));
}

#[test]
fn a_tenant_that_is_closed_is_open_again_with_the_next_welcome() {
    let server = saying("a");
    server.daemon.send(&ToGateway::Welcome(Box::new(closed(Closed::Suspended))));
    let response = loop {
        let response = post(server.address, CHAT, &chat(""));
        if response.status != 200 {
            break response;
        }
    };
    assert_eq!(response.error(), (503, String::new(), "suspended".to_owned()));
    assert_eq!(response.header("retry-after"), Some("60"));
    server.daemon.send(&ToGateway::Welcome(Box::new(welcome())));
    while post(server.address, CHAT, &chat("")).status != 200 {}
}
