//! `quantization_config`: how a checkpoint's matrices were packed into four bits.
//!
//! **Owns** what its keys mean, and which are refused. **Never** looks at a tensor: shapes are checked where tensors are put together.

use serde_json::{Map, Value};

use crate::error::Fault;

/// The key of `config.json`.
pub(super) const KEY: &str = "quantization_config";

/// How words of 32 bits hold eight codes, and what a stored zero means.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Packing {
    /// AWQ's "gemm": a word holds one input of eight outputs. Zeros are stored as they are.
    Awq,
    /// GPTQ: a word holds eight inputs of one output. Zeros are stored less one.
    Gptq,
    /// GPTQ with zeros as they are.
    GptqV2,
}

/// How many inputs of an output share a scale and a zero.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Grouping {
    /// All.
    Whole,
    /// So many, a multiple of 32.
    Of(usize),
}

/// A quantisation that is served: four bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Quantization {
    pub packing: Packing,
    pub grouping: Grouping,
    /// GPTQ: inputs may be in groups by importance and not by place.
    pub act_order: bool,
    /// GPTQ: every zero is said to be 8.
    pub symmetric: bool,
}

/// Parts of names of keys that add arithmetic to that of the weights. A key that has one and is not off is refused; other keys tell how the
/// weights were found, or what tensors and their shapes tell anyway.
const ARITHMETIC: [&str; 8] =
    ["adapter", "lora", "rotat", "hadamard", "transform", "act_bits", "activation", "kv_cache"];

impl Quantization {
    /// What `config` states; `None` where the checkpoint is not quantised.
    pub(super) fn of(config: &Map<String, Value>) -> Result<Option<Self>, Fault> {
        let keys = match config.get(KEY) {
            None | Some(Value::Null) => return Ok(None),
            Some(Value::Object(object)) => Keys(object),
            Some(other) => return Err(Fault::malformed(KEY, format_args!("{other} is no object"))),
        };
        let awq = match keys.text("quant_method")?.as_deref() {
            Some("awq") => true,
            Some("gptq") => false,
            Some(other) => {
                let problem = format!("{other:?} is not served; awq and gptq with 4 bits are");
                return Err(Fault::unsupported(Keys::name("quant_method"), problem));
            }
            None => return Err(Fault::malformed(Keys::name("quant_method"), "the key is missing")),
        };
        keys.refuse_arithmetic()?;
        let (bits_key, bits) = keys.number(&["bits", "w_bit"])?;
        if bits != 4 {
            return Err(Fault::unsupported(bits_key, format_args!("{bits} bits, only 4 are served")));
        }
        Ok(Some(Self {
            packing: if awq { keys.awq()? } else { keys.gptq()? },
            grouping: keys.grouping()?,
            act_order: keys.flag("desc_act")? && !awq,
            symmetric: keys.flag("sym")? && !awq,
        }))
    }
}

struct Keys<'a>(&'a Map<String, Value>);

impl Keys<'_> {
    fn name(key: &str) -> String {
        format!("{KEY}.{key}")
    }

    fn value(&self, key: &str) -> Option<&Value> {
        self.0.get(key).filter(|value| !value.is_null())
    }

    /// Letters in lower case: tools differ in them.
    fn text(&self, key: &str) -> Result<Option<String>, Fault> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text.to_lowercase())),
            Some(other) => Err(Fault::malformed(Self::name(key), format_args!("{other} is no text"))),
        }
    }

    /// False where it is absent.
    fn flag(&self, key: &str) -> Result<bool, Fault> {
        match self.value(key) {
            None => Ok(false),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(other) => Err(Fault::malformed(Self::name(key), format_args!("{other} is no boolean"))),
        }
    }

    /// A number under the first of its names that is there, and that name.
    fn number(&self, names: &[&str]) -> Result<(String, i64), Fault> {
        let found = names.iter().find_map(|name| Some((Self::name(name), self.value(name)?)));
        let missing = || Fault::malformed(Self::name(names[0]), "the key is missing");
        let (name, value) = found.ok_or_else(missing)?;
        match value.as_i64() {
            Some(number) => Ok((name, number)),
            None => Err(Fault::malformed(name, format_args!("{value} is no whole number"))),
        }
    }

    fn refuse_arithmetic(&self) -> Result<(), Fault> {
        for (key, value) in self.0 {
            let off = match value {
                Value::Null | Value::Bool(false) => true,
                Value::Bool(true) => false,
                // Activations of 16 bits and more are not quantised.
                Value::Number(bits) => bits.as_u64().is_some_and(|bits| bits >= 16),
                Value::String(text) => text.is_empty(),
                Value::Array(list) => list.is_empty(),
                Value::Object(object) => object.is_empty(),
            };
            if !off && ARITHMETIC.iter().any(|part| key.contains(part)) {
                let problem = format!("{value} changes what the model computes, and is not served");
                return Err(Fault::unsupported(Self::name(key), problem));
            }
        }
        Ok(())
    }

    /// Refuses a text other than the ones that are served.
    fn only(&self, key: &str, served: &[&str]) -> Result<Option<String>, Fault> {
        let text = self.text(key)?;
        match &text {
            Some(other) if !served.contains(&other.as_str()) => {
                let problem = format!("{other:?} is not served; {} is", served.join(" or "));
                Err(Fault::unsupported(Self::name(key), problem))
            }
            _ => Ok(text),
        }
    }

    fn grouping(&self) -> Result<Grouping, Fault> {
        match self.number(&["group_size", "q_group_size"])? {
            (_, -1) => Ok(Grouping::Whole),
            (key, size) => match usize::try_from(size) {
                Ok(size) if size > 0 && size.is_multiple_of(32) => Ok(Grouping::Of(size)),
                _ => {
                    let problem = format!("{size}; multiples of 32, and -1 for whole rows, are served");
                    Err(Fault::unsupported(key, problem))
                }
            },
        }
    }

    fn awq(&self) -> Result<Packing, Fault> {
        for key in ["version", "format", "checkpoint_format"] {
            self.only(key, &["gemm"])?;
        }
        self.only("backend", &["autoawq", "auto"])?;
        self.only("pack_dtype", &["int32"])?;
        // Without a zero point the file has zeros nevertheless, and they say what they are.
        self.flag("zero_point")?;
        Ok(Packing::Awq)
    }

    fn gptq(&self) -> Result<Packing, Fault> {
        if self.flag("is_marlin_format")? {
            return Err(Fault::unsupported(Self::name("is_marlin_format"), "only false is served"));
        }
        self.only("pack_dtype", &["int32"])?;
        self.only("data_type", &["int"])?;
        let formats = ["gptq", "gptq_v2"];
        let (stated, other) = (self.only("checkpoint_format", &formats)?, self.only("format", &formats)?);
        if let (Some(stated), Some(other)) = (&stated, &other)
            && stated != other
        {
            let problem = format!("{other:?}, but checkpoint_format is {stated:?}");
            return Err(Fault::malformed(Self::name("format"), problem));
        }
        match stated.or(other).as_deref() {
            Some("gptq_v2") => Ok(Packing::GptqV2),
            _ => Ok(Packing::Gptq),
        }
    }
}
