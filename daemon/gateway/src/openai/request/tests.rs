use super::*;

const BOUNDS: Bounds<'static> = Bounds { model: "m", max_n: 4 };

fn completion(fields: &str) -> Result<ValidRequest, ApiError> {
    let comma = if fields.is_empty() { "" } else { "," };
    parse(Kind::Completion, format!(r#"{{"model":"m","prompt":"a"{comma}{fields}}}"#).as_bytes(), BOUNDS)
}

fn chat(fields: &str) -> Result<ValidRequest, ApiError> {
    let comma = if fields.is_empty() { "" } else { "," };
    let body = format!(r#"{{"model":"m","messages":[{{"role":"user","content":"a"}}]{comma}{fields}}}"#);
    parse(Kind::Chat, body.as_bytes(), BOUNDS)
}

fn prompt_of(prompt: &str) -> Result<Input, ApiError> {
    parse(Kind::Completion, format!(r#"{{"model":"m","prompt":{prompt}}}"#).as_bytes(), BOUNDS)
        .map(|r| r.input)
}

fn messages_of(messages: &str) -> Result<Input, ApiError> {
    parse(Kind::Chat, format!(r#"{{"model":"m","messages":{messages}}}"#).as_bytes(), BOUNDS).map(|r| r.input)
}

/// The field and the code of a 400.
fn refusal<T: fmt::Debug>(result: Result<T, ApiError>) -> (String, &'static str) {
    let error = result.unwrap_err();
    assert_eq!(error.status, 400, "{error:?}");
    assert!(!error.message.contains('\n'), "{error:?}");
    (error.param.unwrap_or_default(), error.code.unwrap_or_default())
}

#[test]
fn a_request_that_names_nothing_has_the_defaults_of_openai() {
    let request = completion("").unwrap();
    let expected = ValidRequest {
        kind: Kind::Completion,
        input: Input::Text("a".to_owned()),
        temperature: 1.0,
        top_p: 1.0,
        top_k: None,
        penalties: Penalties::NONE,
        seed: None,
        n: 1,
        max_tokens: None,
        stop: Vec::new(),
        ignore_eos: false,
        form: Form::Whole,
        background: false,
        warnings: Vec::new(),
    };
    assert_eq!(request, expected);
}

#[test]
fn a_request_in_the_background_is_polled_for_unless_it_streams() {
    for (fields, form, background) in [
        (r#""background":true"#, Form::Background, true),
        (r#""background":true,"stream":true"#, Form::Stream { include_usage: false }, true),
        (r#""background":false"#, Form::Whole, false),
        (r#""background":null"#, Form::Whole, false),
    ] {
        for request in [chat(fields).unwrap(), completion(fields).unwrap()] {
            assert_eq!((request.form, request.background), (form, background), "{fields}");
        }
    }
}

#[test]
fn honoured_fields_arrive() {
    let request = chat(
        r#""temperature":0.5,"top_p":0.9,"top_k":5,"seed":-1,"n":3,"max_completion_tokens":7,"stop":["x","y"],
           "ignore_eos":true,"stream":true,"stream_options":{"include_usage":true},"user":"u","metadata":{"a":"b"}"#,
    )
    .unwrap();
    assert_eq!((request.temperature, request.top_p, request.top_k), (0.5, 0.9, Some(5)));
    assert_eq!((request.seed, request.n, request.max_tokens), (Some(u64::MAX), 3, Some(7)));
    assert_eq!(request.stop, ["x", "y"]);
    assert_eq!(request.form, Form::Stream { include_usage: true });
    assert!(request.ignore_eos && request.warnings.is_empty());
}

#[test]
fn penalties_arrive_up_to_the_ends_of_their_ranges() {
    let request = chat(r#""presence_penalty":-2,"frequency_penalty":2,"repetition_penalty":0.01"#).unwrap();
    assert_eq!(request.penalties, Penalties { presence: -2.0, frequency: 2.0, repetition: 0.01 });
    assert_eq!(completion("").unwrap().penalties, Penalties::NONE);
}

#[test]
fn null_is_the_same_as_leaving_a_field_out() {
    let nulls = r#""temperature":null,"top_p":null,"n":null,"stop":null,"stream":null,"max_tokens":null,"tools":null,
                   "stream_options":null,"logit_bias":null,"logprobs":null"#;
    assert_eq!(chat(nulls), chat(""));
}

#[test]
fn values_out_of_range_are_refused_with_their_field() {
    for (fields, param) in [
        (r#""temperature":-0.1"#, "temperature"),
        (r#""temperature":2.1"#, "temperature"),
        (r#""temperature":1e308"#, "temperature"),
        (r#""temperature":"NaN""#, "temperature"),
        (r#""temperature":true"#, "temperature"),
        (r#""top_p":0"#, "top_p"),
        (r#""top_p":1.01"#, "top_p"),
        (r#""top_k":-2"#, "top_k"),
        (r#""top_k":5000000000"#, "top_k"),
        (r#""top_k":1.5"#, "top_k"),
        (r#""presence_penalty":2.1"#, "presence_penalty"),
        (r#""frequency_penalty":-2.1"#, "frequency_penalty"),
        (r#""frequency_penalty":1e300"#, "frequency_penalty"),
        (r#""repetition_penalty":0"#, "repetition_penalty"),
        (r#""repetition_penalty":2.5"#, "repetition_penalty"),
        (r#""repetition_penalty":"1""#, "repetition_penalty"),
        (r#""seed":1.5"#, "seed"),
        (r#""seed":99999999999999999999"#, "seed"),
        (r#""max_tokens":0"#, "max_tokens"),
        (r#""max_tokens":-1"#, "max_tokens"),
        (r#""max_tokens":"7""#, "max_tokens"),
        (r#""stop":"""#, "stop"),
        (r#""stop":["a",""]"#, "stop"),
        (r#""stop":[1]"#, "stop"),
        (r#""stop":["a","a","a","a","a","a","a","a","a","a","a","a","a","a","a","a","a"]"#, "stop"),
        (r#""stream":"yes""#, "stream"),
        (r#""background":"yes""#, "background"),
        (r#""background":1"#, "background"),
        (r#""background":true,"stream_options":{}"#, "stream_options"),
        (r#""user":5"#, "user"),
        (r#""metadata":{"a":1}"#, "metadata"),
        (r#""stream_options":{"include_usage":true}"#, "stream_options"),
        (r#""stream":true,"stream_options":{"include_usage":1}"#, "stream_options.include_usage"),
        (r#""stream":true,"stream_options":[]"#, "stream_options"),
    ] {
        assert_eq!(refusal(completion(fields)), (param.to_owned(), "invalid_value"), "{fields}");
        assert_eq!(refusal(chat(fields)), (param.to_owned(), "invalid_value"), "{fields}");
    }
}

#[test]
fn bug_22_a_tiny_temperature_is_greedy_and_what_is_no_temperature_is_refused() {
    assert_eq!(chat(r#""temperature":1e-9"#).unwrap().temperature.to_bits(), 0);
    assert_eq!(chat(r#""temperature":0"#).unwrap().temperature.to_bits(), 0);
    assert!(chat(r#""temperature":0.0001"#).unwrap().temperature > 0.0);
    for value in ["1e308", "-1", "\"NaN\"", "\"inf\""] {
        let error = chat(&format!(r#""temperature":{value}"#)).unwrap_err();
        assert_eq!((error.status, error.param.as_deref()), (400, Some("temperature")), "{value}");
    }
    // No number of JSON at all: the body is refused where it breaks off.
    for value in ["NaN", "Infinity", "1e999"] {
        assert_eq!(chat(&format!(r#""temperature":{value}"#)).unwrap_err().status, 400, "{value}");
    }
    assert!(chat(r#""top_p":1e-320"#).unwrap().top_p > 0.0);
}

#[test]
fn bug_31_no_and_too_many_choices_are_refused() {
    for n in ["0", "-1", "1000000", "5", "1.5", "99999999999999999999"] {
        assert_eq!(refusal(chat(&format!(r#""n":{n}"#))), ("n".to_owned(), "invalid_value"), "{n}");
    }
}

#[test]
fn bug_26_a_misspelt_field_is_refused_with_the_name_that_was_meant() {
    for (given, meant) in [
        ("max_tokenz", "max_tokens"),
        ("temprature", "temperature"),
        ("Stream", "stream"),
        ("top-p", "top_p"),
    ] {
        let error = chat(&format!(r#""{given}":5"#)).unwrap_err();
        assert_eq!((error.param.as_deref(), error.code), (Some(given), Some("unknown_parameter")));
        assert!(error.message.ends_with(&format!("did you mean `{meant}`?")), "{}", error.message);
    }
    let error = chat(r#""zzzzzzzzzz":5"#).unwrap_err();
    assert!(!error.message.contains("did you mean"), "{}", error.message);
}

#[test]
fn bug_26_fields_that_are_not_supported_are_refused_unless_they_change_nothing() {
    for (field, value) in [
        ("logprobs", "true"),
        ("tools", r#"[{"type":"function"}]"#),
        ("response_format", r#"{"type":"json_object"}"#),
        ("logit_bias", r#"{"5":5}"#),
        ("min_p", "0.1"),
        ("top_logprobs", "5"),
        ("cache_salt", r#""x""#),
        ("guided_json", "{}"),
        ("stop_token_ids", "[5]"),
        ("min_tokens", "3"),
        ("store", "true"),
        ("tool_choice", r#""auto""#),
    ] {
        let given = chat(&format!(r#""{field}":{value}"#));
        assert_eq!(refusal(given), (field.to_owned(), "unsupported_parameter"));
    }
    for (field, value) in [("echo", "true"), ("best_of", "2"), ("suffix", r#""x""#), ("logprobs", "0")] {
        let given = completion(&format!(r#""{field}":{value}"#));
        assert_eq!(refusal(given), (field.to_owned(), "unsupported_parameter"));
    }
    let neutral = r#""presence_penalty":0.0,"frequency_penalty":0,"min_p":0,"logit_bias":{},"response_format":{"type":"text"},
                     "repetition_penalty":1.0,"logprobs":false,"tools":[],"tool_choice":"none","store":false"#;
    assert_eq!(chat(neutral), chat(""));
    assert_eq!(completion(r#""echo":false,"best_of":1,"suffix":"""#), completion(""));
}

#[test]
fn every_field_of_the_tables_is_refused_or_warned_about_when_it_asks_for_something() {
    for (kind, own) in [(Kind::Chat, CHAT), (Kind::Completion, COMPLETION)] {
        for (field, treatment) in COMMON.iter().chain(own) {
            let fields = format!(r#""{field}":"something else""#);
            let result = match kind {
                Kind::Chat => chat(&fields),
                Kind::Completion => completion(&fields),
            };
            match treatment {
                NoEffect => {
                    assert_eq!(result.unwrap().warnings, [format!("`{field}` has no effect on this server")]);
                }
                Refused(_) => assert_eq!(refusal(result), ((*field).to_owned(), "unsupported_parameter")),
            }
        }
    }
}

#[test]
fn the_other_endpoints_fields_are_unknown_here() {
    assert_eq!(refusal(chat(r#""prompt":"a""#)), ("prompt".to_owned(), "unknown_parameter"));
    assert_eq!(
        refusal(completion(r#""max_completion_tokens":5"#)),
        ("max_completion_tokens".to_owned(), "unknown_parameter")
    );
}

#[test]
fn two_names_of_one_limit_must_agree() {
    assert_eq!(chat(r#""max_tokens":5,"max_completion_tokens":5"#).unwrap().max_tokens, Some(5));
    assert_eq!(refusal(chat(r#""max_tokens":5,"max_completion_tokens":6"#)).0, "max_completion_tokens");
}

#[test]
fn a_field_given_twice_is_refused() {
    let error = chat(r#""n":1,"n":2"#).unwrap_err();
    assert!(error.message.contains("\"n\" is given twice"), "{}", error.message);
}

#[test]
fn bug_13_empty_prompts_are_refused_with_their_field() {
    for prompt in ["[]", "[[]]"] {
        assert_eq!(refusal(prompt_of(prompt)), ("prompt".to_owned(), "invalid_value"), "{prompt}");
    }
    // Whether an empty text is a prompt depends on the model's BOS.
    assert_eq!(prompt_of(r#""""#).unwrap(), Input::Text(String::new()));
    assert_eq!(prompt_of(r#"[""]"#).unwrap(), Input::Text(String::new()));
    assert_eq!(refusal(messages_of("[]")), ("messages".to_owned(), "invalid_value"));
    assert_eq!(refusal(messages_of("null")), ("messages".to_owned(), "missing_required_parameter"));
}

#[test]
fn a_prompt_is_a_text_or_tokens_and_one_of_them() {
    assert_eq!(prompt_of(r#"["a"]"#).unwrap(), Input::Text("a".to_owned()));
    assert_eq!(prompt_of("[1, 2]").unwrap(), Input::Tokens(vec![1, 2]));
    assert_eq!(prompt_of("[ [1,2] ]").unwrap(), Input::Tokens(vec![1, 2]));
    for prompt in [r#"["a","b"]"#, "[[1],[2]]"] {
        assert_eq!(refusal(prompt_of(prompt)), ("prompt".to_owned(), "unsupported_value"), "{prompt}");
    }
    for prompt in ["5", "{}", "true", "[1.5]", r#"[1,"a"]"#, r#"["a",1.5,{}]"#, "[{}]"] {
        let error = prompt_of(prompt).unwrap_err();
        assert_eq!((error.status, error.param.as_deref()), (400, Some("prompt")), "{prompt}");
    }
}

#[test]
fn bug_29_a_token_that_no_vocabulary_has_is_refused() {
    for prompt in ["[-1]", "[4294967296]", "[[1,-1]]"] {
        assert_eq!(refusal(prompt_of(prompt)), ("prompt".to_owned(), "invalid_value"), "{prompt}");
    }
}

#[test]
fn contents_are_texts_or_lists_of_text_parts() {
    let parts = r#"[{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}]"#;
    let Input::Chat(messages) = messages_of(parts).unwrap() else { panic!("no chat") };
    assert_eq!(messages[0].content, "ab");
    for (messages, param) in [
        (r#"[{"role":"user"}]"#, "messages[0].content"),
        (r#"[{"role":"user","content":null}]"#, "messages[0].content"),
        (r#"[{"role":"user","content":5}]"#, "messages[0].content"),
        (r#"[{"content":"a"}]"#, "messages[0].role"),
        (r#"[{"role":"robot","content":"a"}]"#, "messages[0].role"),
        (r#"[{"role":"tool","content":"a"}]"#, "messages[0].role"),
        (r#"[{"role":"user","content":"a"},{"role":"user","contents":"a"}]"#, "messages[1].contents"),
        (r#"[{"role":"user","content":"a","tool_calls":[{}]}]"#, "messages[0].tool_calls"),
        (
            r#"[{"role":"user","content":[{"type":"image_url","image_url":{}}]}]"#,
            "messages[0].content[0].type",
        ),
        (r#"[{"role":"user","content":[{"type":"text","text":"a","x":1}]}]"#, "messages[0].content[0].x"),
        (r#"[{"role":"user","content":["a"]}]"#, "messages[0].content[0]"),
        (r#"["a"]"#, "messages[0]"),
        (r#""a""#, "messages"),
    ] {
        assert_eq!(refusal(messages_of(messages)).0, param, "{messages}");
    }
}

#[test]
fn another_model_is_not_found() {
    let error = parse(Kind::Completion, br#"{"model":"x","prompt":"a"}"#, BOUNDS).unwrap_err();
    assert_eq!((error.status, error.code), (404, Some("model_not_found")));
    let error = parse(Kind::Completion, br#"{"prompt":"a"}"#, BOUNDS).unwrap_err();
    assert_eq!((error.status, error.param.as_deref()), (400, Some("model")));
}

#[test]
fn bug_28_a_lone_surrogate_is_refused_where_it_stands() {
    let body = br#"{"model":"m","messages":[{"role":"user","content":"\uD800"}]}"#;
    let error = parse(Kind::Chat, body, BOUNDS).unwrap_err();
    assert_eq!((error.status, error.param.as_deref()), (400, Some("messages[0].content")));
    assert!(error.message.contains("surrogate") || error.message.contains("escape"), "{}", error.message);
    let at: usize =
        error.message.split("at byte ").nth(1).unwrap().split(' ').next().unwrap().parse().unwrap();
    let start = body.windows(6).position(|w| w == br"\uD800").unwrap();
    assert!((start..=start + 8).contains(&at), "byte {at}, the escape starts at {start}: {}", error.message);
}

#[test]
fn what_is_no_json_is_refused_with_the_byte_where_it_ends_to_be() {
    for (body, at) in
        [("", None), ("  ", None), ("{", Some(1)), ("[]", Some(0)), ("{\"a\":\n\n  x}", Some(9))]
    {
        let error = parse(Kind::Chat, body.as_bytes(), BOUNDS).unwrap_err();
        assert_eq!((error.status, error.code), (400, Some("invalid_json")), "{body:?}");
        if let Some(at) = at {
            assert!(error.message.ends_with(&format!("at byte {at}")), "{body:?}: {}", error.message);
        }
    }
    assert!(parse(Kind::Chat, b"{\"a\":\"\xff\"}", BOUNDS).unwrap_err().message.contains("at byte 6"));
}

#[test]
fn deeply_nested_json_is_refused_without_a_deep_stack() {
    for (open, close) in [("[", "]"), ("{\"a\":", "}")] {
        let deep = open.repeat(200_000) + "1" + &close.repeat(200_000);
        for body in
            [deep.clone(), format!(r#"{{"model":"m","prompt":{deep}}}"#), format!(r#"{{"x":{deep}}}"#)]
        {
            assert_eq!(parse(Kind::Completion, body.as_bytes(), BOUNDS).unwrap_err().status, 400);
        }
    }
}

proptest::proptest! {
    #[test]
    fn no_bytes_make_the_parser_panic(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..100)) {
        let _ = parse(Kind::Chat, &bytes, BOUNDS);
    }

    #[test]
    fn no_text_near_json_makes_the_parser_panic(text in r#"[\[\]{}",:a0\\u]{0,40}"#) {
        let _ = parse(Kind::Chat, format!(r#"{{"model":"m","messages":{text}}}"#).as_bytes(), BOUNDS);
        let _ = parse(Kind::Completion, format!(r#"{{"model":"m","prompt":{text}}}"#).as_bytes(), BOUNDS);
    }
}
