//! An opened model: what the worker loads and the gateway's template process reads its text part from.

use std::ops::Range;
use std::path::{Path, PathBuf};

use crate::config::ModelConfig;
use crate::error::{Fault, ModelError};
use crate::file::SourceFile;
use crate::gguf::Gguf;
use crate::hf::HfDirectory;
use crate::synthetic::{Synthetic, SyntheticElements};
use crate::template::ChatTemplate;
use crate::tensor::{TensorInfo, TensorRole};
use crate::tokenizer::Tokenizer;

/// A model file or directory, opened and checked, or a synthetic model. Weights stay in the file, or are not made, until
/// [`read`](Self::read).
///
/// Having one tells you: the header is consistent, every tensor the configuration implies is there with its shape and a
/// served type, none overlap, all lie inside the file. It does not tell you that the weights make sense, or that the file
/// was not changed since.
#[derive(Debug)]
pub struct ModelSource {
    text: Text,
    files: Vec<SourceFile>,
    config: ModelConfig,
    tensors: Vec<TensorInfo>,
    digest: [u8; 16],
}

/// Where tokenizer and chat template come from, and the weights of a synthetic model.
#[derive(Debug)]
enum Text {
    Gguf(Gguf),
    Directory(HfDirectory),
    Synthetic(Synthetic),
}

/// What a reader of one format hands over.
pub(crate) struct Parts {
    pub files: Vec<SourceFile>,
    pub config: ModelConfig,
    pub tensors: Vec<TensorInfo>,
    /// Every byte that says what the model is, apart from weights.
    pub header: blake3::Hash,
}

/// A stretch of a file that weights are read from.
pub(crate) struct Span<'a> {
    pub name: &'a str,
    pub file: usize,
    pub offset: u64,
    pub bytes: u64,
}

impl<'a> Span<'a> {
    /// Of a tensor that is in the file as it is read.
    pub(crate) fn of(tensor: &'a TensorInfo) -> Self {
        Self { name: &tensor.name, file: tensor.file, offset: tensor.offset, bytes: tensor.bytes }
    }
}

impl ModelSource {
    /// Opens a GGUF file, or a directory with `config.json` and safetensors: told apart by content. A path that begins with `synthetic:`
    /// names no file, but the shape of a published model, whose weights are random, and in four bits with `:q4_1` behind it; a wrong name is
    /// answered with those that are known.
    ///
    /// # Errors
    /// One line that names the file and the tensor or key. Memory used stays in proportion to the header, whatever sizes
    /// it states.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        let io = |source| ModelError::Io { path: path.to_owned(), source };
        let (text, parts) = if let Some((synthetic, parts)) = Synthetic::open(path).transpose()? {
            (Text::Synthetic(synthetic), parts)
        } else if std::fs::metadata(path).map_err(io)?.is_dir() {
            let (directory, parts) = HfDirectory::open(path)?;
            (Text::Directory(directory), parts)
        } else {
            let (gguf, parts) = Gguf::open(path)?;
            (Text::Gguf(gguf), parts)
        };
        let Parts { files, config, mut tensors, header } = parts;
        tensors.sort_by_key(|t| (t.file, t.offset));
        let spans: Vec<_> = match &text {
            Text::Gguf(_) => tensors.iter().map(Span::of).collect(),
            Text::Directory(directory) => tensors.iter().flat_map(|tensor| directory.spans(tensor)).collect(),
            // The header says all.
            Text::Synthetic(_) => Vec::new(),
        };
        let digest = digest(&files, &spans, header)?;
        Ok(Self { text, files, config, tensors, digest })
    }

    /// Dimensions and constants.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Every tensor, in file order: reading them in turn reads the disk in one direction.
    pub fn tensors(&self) -> impl Iterator<Item = &TensorInfo> {
        self.tensors.iter()
    }

    /// The tensor of a role, if the model has it.
    pub fn tensor(&self, role: TensorRole) -> Option<&TensorInfo> {
        self.tensors.iter().find(|t| t.role == role)
    }

    /// Reads a whole tensor into `dst`, which has exactly [`TensorInfo::bytes`] bytes.
    ///
    /// # Errors
    /// The file became shorter, or cannot be read; `dst` has another size.
    pub fn read(&self, tensor: &TensorInfo, dst: &mut [u8]) -> Result<(), ModelError> {
        self.read_rows(tensor, 0..tensor.rows, dst)
    }

    /// Reads the rows `[rows.start, rows.end)` into `dst`, which has exactly their bytes.
    ///
    /// Matrices of AWQ and GPTQ checkpoints are converted meanwhile, which takes about half a megabyte beside `dst`.
    ///
    /// # Errors
    /// As [`read`](Self::read); rows outside the tensor; a scale that half precision does not hold.
    pub fn read_rows(
        &self,
        tensor: &TensorInfo,
        rows: Range<usize>,
        dst: &mut [u8],
    ) -> Result<(), ModelError> {
        let row_bytes = tensor.row_bytes();
        let wanted = rows.end.checked_sub(rows.start).and_then(|n| n.checked_mul(row_bytes));
        if rows.end > tensor.rows || wanted != Some(dst.len()) {
            let problem =
                format!("rows {rows:?} of {} do not fill a buffer of {} bytes", tensor.rows, dst.len());
            return Err(Fault::unsupported(&tensor.name, problem).at(&self.path_of(tensor)));
        }
        if let Text::Synthetic(synthetic) = &self.text {
            synthetic.fill(tensor, rows, dst);
            return Ok(());
        }
        if let Text::Directory(directory) = &self.text
            && let Some(read) = directory.read_packed(tensor, &self.files, rows.clone(), dst)
        {
            return read;
        }
        let file = &self.files[tensor.file.min(self.files.len() - 1)];
        let offset =
            (rows.start as u64).checked_mul(row_bytes as u64).and_then(|o| o.checked_add(tensor.offset));
        file.read_at(offset.unwrap_or(u64::MAX), dst, &tensor.name).map_err(|fault| fault.at(&file.path))
    }

    /// Where a tensor comes from, for messages.
    fn path_of(&self, tensor: &TensorInfo) -> PathBuf {
        match &self.text {
            Text::Synthetic(synthetic) => synthetic.path().into(),
            Text::Gguf(_) | Text::Directory(_) => {
                self.files[tensor.file.min(self.files.len() - 1)].path.clone()
            }
        }
    }

    /// What the elements of a tensor are where the model is synthetic: they can be made where they are needed instead of read. `None` for
    /// the tensors of files.
    pub fn synthetic(&self, tensor: &TensorInfo) -> Option<SyntheticElements> {
        match &self.text {
            Text::Synthetic(synthetic) => Some(synthetic.elements(tensor)),
            Text::Gguf(_) | Text::Directory(_) => None,
        }
    }

    /// Tells models apart: BLAKE3, cut to 128 bits, of the whole header (metadata, tensor names, types, shapes, offsets),
    /// the files' sizes, and the first and last 4 KiB of each tensor. Names and times of files do not enter. Of a synthetic model: its name
    /// and the version of how weights are made.
    pub fn digest(&self) -> [u8; 16] {
        self.digest
    }

    /// Builds the tokenizer.
    ///
    /// # Errors
    /// A vocabulary, merge or rule that is damaged, or that cannot be followed exactly.
    pub fn tokenizer(&self) -> Result<Tokenizer, ModelError> {
        match &self.text {
            Text::Gguf(gguf) => gguf.tokenizer(&self.files[0], &self.config),
            Text::Directory(directory) => directory.tokenizer(&self.config),
            Text::Synthetic(synthetic) => synthetic.tokenizer(),
        }
    }

    /// Compiles the model's chat template; `None` where it has none.
    ///
    /// # Errors
    /// The template does not parse.
    pub fn chat_template(&self) -> Result<Option<ChatTemplate>, ModelError> {
        match &self.text {
            Text::Gguf(gguf) => gguf.chat_template(&self.files[0]),
            Text::Directory(directory) => directory.chat_template(),
            Text::Synthetic(synthetic) => synthetic.chat_template().map(Some),
        }
    }
}

fn digest(files: &[SourceFile], spans: &[Span<'_>], header: blake3::Hash) -> Result<[u8; 16], ModelError> {
    const SAMPLE: u64 = 4 << 10;
    let mut hasher = blake3::Hasher::new_derive_key("pagedd model digest 1");
    hasher.update(header.as_bytes());
    for file in files {
        hasher.update(&file.len.to_le_bytes());
    }
    let mut buffer = [0; SAMPLE as usize];
    for &Span { name, file, offset, bytes } in spans {
        let file = &files[file];
        let length = bytes.min(SAMPLE);
        for offset in [offset, offset + bytes - length] {
            let sample = &mut buffer[..length as usize];
            file.read_at(offset, sample, name).map_err(|fault| fault.at(&file.path))?;
            hasher.update(sample);
        }
    }
    let mut out = [0; 16];
    out.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
    Ok(out)
}
