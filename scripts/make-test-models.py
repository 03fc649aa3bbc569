#!/usr/bin/env python3
"""Test models from SmolLM2: other element types, a checkpoint directory, and tiny random models with its tokenizer.

Usage: make-test-models.py SOURCE.gguf OUTPUT_DIR [NAME ...]

Names (default: all):
  f32 f16 bf16 q8_0 q5_0 q5_1 q4_0 q4_1   SmolLM2 as OUTPUT_DIR/smollm2-NAME.gguf, matrices requantised from float32
  hf-f32 hf-bf16                          SmolLM2 as a Hugging Face directory, F32 in one file, BF16 in three
  tiny-llama tiny-qwen2                   two random layers as GGUF, F32
  tiny-hf tiny-hf-sharded                 the random llama as a directory

Needs the PyPI package gguf (and numpy, which it brings). Deterministic: the same source gives the same files.
"""

import json
import sys
from pathlib import Path

try:
    import numpy as np
    from gguf import GGMLQuantizationType as Type
    from gguf import GGUFReader, GGUFWriter
    from gguf.quants import dequantize, quantize
except ImportError as error:
    sys.exit(f"{error.name} is missing: pip install gguf")

TYPES = ["f32", "f16", "bf16", "q8_0", "q5_0", "q5_1", "q4_0", "q4_1"]
NAMES = [*TYPES, "hf-f32", "hf-bf16", "tiny-llama", "tiny-qwen2", "tiny-hf", "tiny-hf-sharded"]
TINY = {"hidden": 64, "feed_forward": 96, "heads": 4, "kv_heads": 2, "head_dim": 16, "layers": 2, "context": 512}


class Source:
    """The source model: metadata, and matrices as float32 in the order of the GGUF file."""

    def __init__(self, path):
        self.reader = GGUFReader(path)

    def value(self, key):
        return self.reader.fields[key].contents()

    def weights(self):
        for tensor in self.reader.tensors:
            shape = tuple(int(n) for n in reversed(tensor.shape))
            yield tensor.name, dequantize(tensor.data, tensor.tensor_type).reshape(shape).astype(np.float32)

    def copy_metadata(self, writer, prefix=""):
        for key, field in self.reader.fields.items():
            if key.startswith("GGUF.") or key == "general.architecture" or not key.startswith(prefix):
                continue
            kind, inner = field.types[0], field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), kind, sub_type=inner)


def write_gguf(path, writer, tensors):
    """`tensors`: (name, float32 array, type) each."""
    for name, weights, kind in tensors:
        data = weights if kind == Type.F32 else quantize(weights, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    print(path)


def requantised(source, out, name):
    kind = Type[name.upper()]
    path = out / f"smollm2-{name}.gguf"
    writer = GGUFWriter(path, "llama")
    source.copy_metadata(writer)
    write_gguf(path, writer, ((n, w, kind if w.ndim == 2 else Type.F32) for n, w in source.weights()))


def tiny_weights(architecture):
    """Random weights, with the rows of rotated projections in the order of halves."""
    random = np.random.Generator(np.random.PCG64(1))
    t = TINY
    query, kv = t["heads"] * t["head_dim"], t["kv_heads"] * t["head_dim"]

    def matrix(rows, columns):
        return (random.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

    def vector(size, centre):
        return (centre + 0.1 * random.standard_normal(size)).astype(np.float32)

    weights = {"token_embd.weight": matrix(t["vocab"], t["hidden"]), "output_norm.weight": vector(t["hidden"], 1)}
    for layer in range(t["layers"]):
        for name, make in {
            "attn_norm.weight": lambda: vector(t["hidden"], 1),
            "attn_q.weight": lambda: matrix(query, t["hidden"]),
            "attn_k.weight": lambda: matrix(kv, t["hidden"]),
            "attn_v.weight": lambda: matrix(kv, t["hidden"]),
            "attn_output.weight": lambda: matrix(t["hidden"], query),
            "ffn_norm.weight": lambda: vector(t["hidden"], 1),
            "ffn_gate.weight": lambda: matrix(t["feed_forward"], t["hidden"]),
            "ffn_up.weight": lambda: matrix(t["feed_forward"], t["hidden"]),
            "ffn_down.weight": lambda: matrix(t["hidden"], t["feed_forward"]),
        }.items():
            weights[f"blk.{layer}.{name}"] = make()
        if architecture == "qwen2":
            for name, size in {"attn_q.bias": query, "attn_k.bias": kv, "attn_v.bias": kv}.items():
                weights[f"blk.{layer}.{name}"] = vector(size, 0)
    return weights


def interleave(weights, heads):
    """Rows i and i + d/2 of each head become rows 2i and 2i + 1, as llama GGUF files have them."""
    rows = weights.shape[0]
    return weights.reshape(heads, 2, rows // heads // 2, -1).swapaxes(1, 2).reshape(weights.shape)


def deinterleave(weights, heads):
    rows = weights.shape[0]
    return weights.reshape(heads, rows // heads // 2, 2, -1).swapaxes(1, 2).reshape(weights.shape)


def tiny_gguf(source, out, architecture):
    path = out / f"tiny-{architecture}.gguf"
    writer = GGUFWriter(path, architecture)
    source.copy_metadata(writer, prefix="tokenizer.")
    t = TINY
    writer.add_block_count(t["layers"])
    writer.add_context_length(t["context"])
    writer.add_embedding_length(t["hidden"])
    writer.add_feed_forward_length(t["feed_forward"])
    writer.add_head_count(t["heads"])
    writer.add_head_count_kv(t["kv_heads"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    tensors = []
    for name, weights in tiny_weights(architecture).items():
        if architecture == "llama" and "attn_q.weight" in name:
            weights = interleave(weights, t["heads"])
        if architecture == "llama" and "attn_k.weight" in name:
            weights = interleave(weights, t["kv_heads"])
        tensors.append((name, weights, Type.F32))
    write_gguf(path, writer, tensors)


def hf_name(name):
    for ours, theirs in {
        "token_embd": "model.embed_tokens", "output_norm": "model.norm", "blk.": "model.layers.",
        "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_output": "self_attn.o_proj",
        "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
        "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }.items():
        name = name.replace(ours, theirs)
    return name


def write_safetensors(path, tensors, bf16):
    header, parts, end = {"__metadata__": {"format": "pt"}}, [], 0
    for name, weights in tensors:
        data = (quantize(weights, Type.BF16) if bf16 else np.ascontiguousarray(weights)).tobytes()
        header[name] = {"dtype": "BF16" if bf16 else "F32", "shape": list(weights.shape),
                        "data_offsets": [end, end + len(data)]}
        parts.append(data)
        end += len(data)
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.writelines(parts)


def write_json(path, value):
    path.write_text(json.dumps(value, ensure_ascii=False))


def directory(source, path, config, tensors, bf16, shards):
    """A checkpoint; `tensors` in the order of halves."""
    path.mkdir(parents=True, exist_ok=True)
    write_json(path / "config.json", {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "tie_word_embeddings": True, "torch_dtype": "bfloat16" if bf16 else "float32",
        "bos_token_id": 1, "eos_token_id": 2, **config})
    write_json(path / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2})
    texts, kinds = source.value("tokenizer.ggml.tokens"), source.value("tokenizer.ggml.token_type")
    write_json(path / "tokenizer_config.json", {
        "bos_token": texts[1], "eos_token": texts[2], "add_bos_token": False,
        "chat_template": source.value("tokenizer.chat_template")})
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    write_json(path / "tokenizer.json", {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [
            {"id": i, "content": text, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": True}
            for i, (text, kind) in enumerate(zip(texts, kinds)) if kind == 3],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Digits", "individual_digits": True}, byte_level]},
        "post_processor": None, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": {text: i for i, text in enumerate(texts)},
                  "merges": [merge.split(" ", 1) for merge in source.value("tokenizer.ggml.merges")]}})
    tensors = [(hf_name(name), weights) for name, weights in tensors]
    if shards == 1:
        write_safetensors(path / "model.safetensors", tensors, bf16)
    else:
        names = {}
        for number in range(shards):
            name = f"model-{number + 1:05}-of-{shards:05}.safetensors"
            part = tensors[number * len(tensors) // shards:(number + 1) * len(tensors) // shards]
            write_safetensors(path / name, part, bf16)
            names |= {tensor: name for tensor, _ in part}
        write_json(path / "model.safetensors.index.json", {"metadata": {}, "weight_map": names})
    print(path)


def smollm2_directory(source, path, bf16, shards):
    heads, kv_heads = source.value("llama.attention.head_count"), source.value("llama.attention.head_count_kv")
    tensors = []
    for name, weights in source.weights():
        if "attn_q.weight" in name:
            weights = deinterleave(weights, heads)
        if "attn_k.weight" in name:
            weights = deinterleave(weights, kv_heads)
        tensors.append((name, weights))
    config = {
        "hidden_size": source.value("llama.embedding_length"), "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "num_hidden_layers": source.value("llama.block_count"),
        "intermediate_size": source.value("llama.feed_forward_length"), "vocab_size": source.value("llama.vocab_size"),
        "max_position_embeddings": source.value("llama.context_length"),
        "rope_theta": source.value("llama.rope.freq_base"), "rms_norm_eps": 1e-5}
    directory(source, path, config, tensors, bf16, shards)


def tiny_directory(source, path, shards):
    t = TINY
    config = {
        "hidden_size": t["hidden"], "num_attention_heads": t["heads"], "num_key_value_heads": t["kv_heads"],
        "head_dim": t["head_dim"], "num_hidden_layers": t["layers"], "intermediate_size": t["feed_forward"],
        "vocab_size": t["vocab"], "max_position_embeddings": t["context"], "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5}
    directory(source, path, config, list(tiny_weights("llama").items()), False, shards)


def main(arguments):
    if len(arguments) < 2 or arguments[0] in ("-h", "--help"):
        sys.exit(__doc__)
    source_path, out, names = Path(arguments[0]), Path(arguments[1]), arguments[2:] or NAMES
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        sys.exit(f"unknown model {unknown[0]!r}; known: {' '.join(NAMES)}")
    if not source_path.is_file():
        sys.exit(f"{source_path} is missing: run `make model`")
    out.mkdir(parents=True, exist_ok=True)
    source = Source(source_path)
    TINY["vocab"] = len(source.value("tokenizer.ggml.tokens"))
    for name in names:
        if name in TYPES:
            requantised(source, out, name)
        elif name.startswith("tiny-hf"):
            tiny_directory(source, out / name, 2 if name.endswith("sharded") else 1)
        elif name.startswith("tiny-"):
            tiny_gguf(source, out, name.removeprefix("tiny-"))
        else:
            bf16 = name == "hf-bf16"
            smollm2_directory(source, out / f"smollm2-{name}", bf16, 3 if bf16 else 1)


if __name__ == "__main__":
    main(sys.argv[1:])
