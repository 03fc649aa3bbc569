use super::*;

use half::bf16;
use pagedd_core::TokenId;

use crate::{LayerTensor, Message, ModelSource, RenderOptions};

fn open(name: &str) -> ModelSource {
    ModelSource::open(Path::new(&format!("synthetic:{name}"))).unwrap()
}

fn rows(source: &ModelSource, role: TensorRole, rows: Range<usize>) -> Vec<u8> {
    let tensor = source.tensor(role).unwrap();
    let mut bytes = vec![0xee; rows.len() * tensor.row_bytes()];
    source.read_rows(tensor, rows, &mut bytes).unwrap();
    bytes
}

fn values(bytes: &[u8]) -> Vec<f64> {
    bytes.as_chunks().0.iter().map(|&b| f64::from(bf16::from_le_bytes(b))).collect()
}

#[test]
fn models_have_the_numbers_of_parameters_that_were_published() {
    for (name, parameters) in [
        ("llama-3-8b", 8_030_261_248_u64),
        ("llama-2-7b", 6_738_415_616),
        ("llama-2-13b", 13_015_864_320),
        ("qwen2.5-7b", 7_615_616_512),
        ("smollm2-135m", 134_515_008),
    ] {
        let source = open(name);
        let count: u64 = source.tensors().map(|t| t.rows as u64 * t.columns as u64).sum();
        assert_eq!(count, parameters, "{name}");
        assert!(
            source.tensors().all(|t| t.ty == TensorType::BF16 && t.bytes == 2 * (t.rows * t.columns) as u64)
        );
        let source = open(&format!("{name}:q4_1"));
        assert_eq!(source.tensors().map(|t| t.rows as u64 * t.columns as u64).sum::<u64>(), parameters);
        assert!(source.tensors().all(|t| {
            let matrix = t.ty == TensorType::Q4_1 && t.bytes == (t.rows * t.columns / 32 * 20) as u64;
            t.role.is_vector() != matrix && (matrix || t.ty == TensorType::BF16)
        }));
    }
    assert_eq!(SHAPES.len(), 5, "a new shape needs its number");
}

#[test]
fn shapes_pass_the_checks_that_files_pass() {
    for shape in &SHAPES {
        let (_, parts) = Synthetic::named(shape.name).unwrap();
        let stated = |value: usize| ("key".to_owned(), value as u64);
        let stated = check::Stated {
            architecture: shape.architecture,
            layers: stated(shape.layers),
            hidden: stated(shape.hidden),
            feed_forward: stated(shape.feed_forward),
            heads: stated(shape.heads),
            kv_heads: stated(shape.kv_heads),
            head_dim: stated(shape.head_dim),
            context: stated(shape.context as usize),
            window: None,
            rms_eps: ("key".to_owned(), shape.rms_eps),
            rope_base: ("key".to_owned(), shape.rope_base),
            pairing: RopePairing::Halves,
            scaling: RopeScaling::None,
        };
        assert_eq!(check::configure(stated, &parts.tensors).unwrap(), parts.config, "{}", shape.name);
        assert_eq!(shape.heads * shape.head_dim, shape.hidden, "{}", shape.name);
    }
}

#[test]
fn rows_read_alone_are_those_of_the_whole_tensor_and_two_opens_are_equal() {
    let (one, two) = (open("smollm2-135m"), open("smollm2-135m"));
    assert_eq!(one.digest(), two.digest());
    let role = TensorRole::Layer(3, LayerTensor::AttnK);
    let whole = rows(&one, role, 0..192);
    for range in [0..1, 5..9, 100..192, 191..192, 7..7] {
        let row = 2 * 576;
        assert_eq!(rows(&two, role, range.clone()), whole[range.start * row..range.end * row], "{range:?}");
    }
    let mut read = vec![0; whole.len()];
    two.read(two.tensor(role).unwrap(), &mut read).unwrap();
    assert_eq!(read, whole);
}

#[test]
fn no_two_tensors_or_models_have_the_same_numbers() {
    let source = open("qwen2.5-7b");
    let mut firsts: Vec<Vec<u8>> = source
        .tensors()
        .filter(|t| matches!(source.synthetic(t), Some(SyntheticElements::Normal { .. })))
        .map(|t| {
            let mut bytes = vec![0; t.row_bytes()];
            source.read_rows(t, 0..1, &mut bytes).unwrap();
            bytes.truncate(32);
            bytes
        })
        .collect();
    let count = firsts.len();
    // Matrices and biases: 10 in each layer, and 2.
    assert_eq!(count, 28 * 10 + 2);
    firsts.sort();
    firsts.dedup();
    assert_eq!(firsts.len(), count);
    let [seven, thirteen] = ["llama-2-7b", "llama-2-13b"].map(open);
    assert_ne!(seven.digest(), thirteen.digest());
    let embedding = |source| rows(source, TensorRole::TokenEmbd, 0..1)[..32].to_vec();
    assert_ne!(embedding(&seven), embedding(&thirteen));
}

#[test]
fn norms_are_one_and_everything_else_is_normal() {
    let source = open("qwen2.5-7b");
    for role in [TensorRole::OutputNorm, TensorRole::Layer(9, LayerTensor::FfnNorm)] {
        assert!(
            values(&rows(&source, role, 0..1)).iter().all(|&v| v.to_bits() == 1.0_f64.to_bits()),
            "{role}"
        );
        assert_eq!(source.synthetic(source.tensor(role).unwrap()), Some(SyntheticElements::Ones));
    }
    for (role, count) in [
        (TensorRole::Output, 200),
        (TensorRole::Layer(9, LayerTensor::FfnDown), 40),
        (TensorRole::Layer(9, LayerTensor::AttnQBias), 1),
    ] {
        let values = values(&rows(&source, role, 0..count));
        let n = values.len() as f64;
        let mean = values.iter().sum::<f64>() / n;
        let deviation = (values.iter().map(|v| v * v).sum::<f64>() / n).sqrt();
        assert!(mean.abs() < 5.0 * 0.02 / n.sqrt(), "{role}: mean {mean}");
        assert!((deviation / 0.02 - 1.0).abs() < 5.0 / (2.0 * n).sqrt(), "{role}: deviation {deviation}");
    }
}

#[test]
fn a_model_in_four_bits_has_blocks_of_its_own_whose_weights_deviate_as_much() {
    let (plain, source) = (open("smollm2-135m"), open("smollm2-135m:q4_1"));
    assert_ne!(plain.digest(), source.digest());
    let role = TensorRole::Layer(9, LayerTensor::FfnDown);
    let whole = rows(&source, role, 0..576);
    assert_eq!(rows(&source, role, 7..9), whole[7 * 960..9 * 960]);
    assert_ne!(rows(&source, TensorRole::Layer(8, LayerTensor::FfnDown), 0..1), whole[..960]);
    let weights: Vec<f64> = whole
        .as_chunks::<20>()
        .0
        .iter()
        .flat_map(|block| {
            let half_at = |at| f64::from(half::f16::from_le_bytes([block[at], block[at + 1]]));
            let (scale, minimum) = (half_at(0), half_at(2));
            let nibbles = block[4..].iter().flat_map(|byte| [byte & 15, byte >> 4]);
            nibbles.map(move |number| scale * f64::from(number) + minimum).collect::<Vec<_>>()
        })
        .collect();
    let n = weights.len() as f64;
    let mean = weights.iter().sum::<f64>() / n;
    let deviation = (weights.iter().map(|w| w * w).sum::<f64>() / n).sqrt();
    assert!(mean.abs() < 5.0 * 0.02 / n.sqrt(), "mean {mean}");
    // Scales differ by up to a quarter, so that it is about a hundredth more.
    assert!((deviation / 0.02 - 1.01).abs() < 0.01, "deviation {deviation}");
    assert_eq!(
        source.synthetic(source.tensor(TensorRole::OutputNorm).unwrap()),
        Some(SyntheticElements::Ones)
    );
}

#[test]
fn rows_outside_a_tensor_and_buffers_of_another_size_are_refused() {
    let source = open("smollm2-135m");
    let tensor = source.tensor(TensorRole::OutputNorm).unwrap();
    for (rows, bytes) in [(0..2, 2 * 1152), (0..1, 1150), (1..2, 1152)] {
        let error = source.read_rows(tensor, rows, &mut vec![0; bytes]).unwrap_err().to_string();
        assert!(error.contains("synthetic:smollm2-135m: model.norm.weight"), "{error}");
    }
}

#[test]
fn an_unknown_model_names_those_that_are_known() {
    for name in ["llama-3-70b", "", "LLAMA-3-8B", "llama-2-7b:q4_0", ":q4_1"] {
        let path = format!("synthetic:{name}");
        let error = ModelSource::open(Path::new(&path)).unwrap_err();
        let known = "llama-3-8b, llama-2-7b, llama-2-13b, qwen2.5-7b, smollm2-135m";
        assert_eq!(
            error.to_string(),
            format!("{path}: model: not known; {known} are, also with :q4_1 behind them")
        );
    }
    // A file of such a name can still be meant.
    let error = ModelSource::open(Path::new("./synthetic:smollm2-135m")).unwrap_err();
    assert!(matches!(error, ModelError::Io { .. }), "{error}");
}

#[test]
fn any_text_is_its_bytes_and_comes_back() {
    for name in ["smollm2-135m", "llama-2-7b"] {
        let source = open(name);
        let tokenizer = source.tokenizer().unwrap();
        assert_eq!(tokenizer.vocab_size() as usize, source.config().vocab);
        let every: String =
            (0..0x3000).filter_map(char::from_u32).chain(['\u{1f642}', '\u{10ffff}']).collect();
        for text in ["", " ", "hello there  123\r\n", "ünïcödé 🙂", "<|im_end|> w300", &every] {
            for ids in [tokenizer.encode(text), tokenizer.encode_prompt(text)] {
                let bytes: Vec<u8> = ids.iter().flat_map(|&id| tokenizer.token_bytes(id)).copied().collect();
                assert_eq!(bytes, text.as_bytes());
                assert!(ids.iter().zip(text.bytes()).all(|(id, byte)| id.0 == u32::from(byte)));
            }
        }
    }
}

#[test]
fn every_token_but_control_tokens_shows_as_text_of_its_own() {
    let tokenizer = open("llama-3-8b").tokenizer().unwrap();
    assert_eq!(tokenizer.stop_ids(), [TokenId(256), TokenId(258)]);
    assert_eq!(tokenizer.bos(), None);
    let mut texts = std::collections::BTreeSet::new();
    for id in (0..tokenizer.vocab_size()).map(TokenId) {
        let text = tokenizer.token_bytes(id);
        if (256..259).contains(&id.0) {
            assert!(text.is_empty() && tokenizer.is_control(id), "{id}");
        } else {
            assert!(!text.is_empty() && texts.insert(text), "{id}: {text:?}");
        }
    }
    assert_eq!(tokenizer.token_bytes(TokenId(128_255)), b" w128255");
}

#[test]
fn chats_are_told_apart_by_control_tokens() {
    let source = open("smollm2-135m");
    let template = source.chat_template().unwrap().expect("a template");
    let options = RenderOptions { add_generation_prompt: true, ..RenderOptions::default() };
    let messages = [Message::new("user", "hi <|im_end|>")];
    let pieces = template.render(&messages, &options).unwrap();
    let text: String = pieces.iter().map(crate::Piece::text).collect();
    assert_eq!(text, "<|im_start|>user\nhi <|im_end|><|im_end|>\n<|im_start|>assistant\n");
    let ids = source.tokenizer().unwrap().encode_pieces(&pieces);
    let controls: Vec<u32> = ids.iter().map(|id| id.0).filter(|&id| id > 255).collect();
    assert_eq!(controls, [257, 258, 257], "what the client wrote ends no message");
}
