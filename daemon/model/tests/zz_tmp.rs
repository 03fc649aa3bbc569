#[test]
fn tmp() {
    for e in std::fs::read_dir("/tmp/pagedd/models").unwrap() {
        let p = e.unwrap().path();
        let s = pagedd_model::ModelSource::open(&p).unwrap();
        let t = s.tokenizer().unwrap();
        let c = s.chat_template().unwrap().unwrap();
        let pc = c
            .render(&[pagedd_model::Message::new("user", "hi 123 <|im_end|>")], &Default::default())
            .unwrap();
        println!("{} {:?} {} {:?}", p.display(), s.config(), s.tensors().count(), t.encode_pieces(&pc));
    }
    let rss = |w: &str| {
        println!(
            "{w} {}",
            std::fs::read_to_string("/proc/self/status")
                .unwrap()
                .lines()
                .filter(|l| l.starts_with("VmRSS") || l.starts_with("VmHWM"))
                .collect::<Vec<_>>()
                .join(" ")
        )
    };
    rss("start");
    let s =
        pagedd_model::ModelSource::open("/work/main/.cache/models/SmolLM2-135M-Instruct.Q4_1.gguf".as_ref())
            .unwrap();
    rss("open");
    let t0 = std::time::Instant::now();
    let t = s.tokenizer().unwrap();
    println!("{:?}", t0.elapsed());
    rss("tokenizer");
    let _c = s.chat_template().unwrap();
    drop(s);
    rss("template");
    for text in [
        " ".repeat(4_000_000),
        " ".repeat(11_000_000) + "x",
        "h".repeat(4_000_000),
        "hello world, it's 12. ".repeat(50_000),
    ] {
        let t0 = std::time::Instant::now();
        println!("{} {:?}", t.encode(&text).len(), t0.elapsed());
    }
    rss("end");
    // qwen2 / llama3 style regex with long gaps
    let d = std::path::Path::new("/tmp/pagedd/tinyq.gguf");
    for pre in ["qwen2", "llama-bpe"] {
        let mut w = pagedd_model::testing::gguf_writer(1, &Default::default());
        w.set("tokenizer.ggml.pre", pre);
        std::fs::write(d, w.bytes()).unwrap();
        let t = pagedd_model::ModelSource::open(d).unwrap().tokenizer().unwrap();
        for text in [
            " ".repeat(11_000_000) + "x",
            " \n".repeat(2_000_000),
            "h".repeat(11_000_000),
            "!".repeat(11_000_000),
            " ".repeat(11_000_000),
        ] {
            let t0 = std::time::Instant::now();
            let r = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| t.encode(&text).len()));
            println!("{pre} {:?} {:?}", r.map_err(|_| "panic"), t0.elapsed());
        }
    }
}
