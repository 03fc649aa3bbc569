#!/usr/bin/env python3
"""transformers with static batches on a GPU, beside what `pagedd bench throughput` measured there: the same shape, random weights, bf16, greedy.

  gpu_hf.py --results FOLDER [--cases throughput-8b:8,throughput-8b:64,throughput-8b:256,mixed-8b:64] [--device cuda:0] [--json FILE]

A case is NAME:BATCH. FOLDER/NAME.json says how many requests there were, how long, and how many of them ended in a second. Here they are taken
in an order of their own, BATCH at a time, padded to the longest prompt of a batch, which runs until its longest answer is done; so many batches as
take `--seconds`, two at least. Needs torch and transformers; where they are not there, it says so and ends with 0: they are no part of this.
"""
import argparse
import json
import pathlib
import random
import sys
import time

LLAMA_3_8B = dict(vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
                  num_key_value_heads=8, head_dim=128, max_position_embeddings=8192, rope_theta=500000.0, rms_norm_eps=1e-5,
                  tie_word_embeddings=False, pad_token_id=0, bos_token_id=1, eos_token_id=None)
HEADINGS = ["case", "batch", "requests", "seconds", "req/s", "ours req/s", "ratio"]


def spread(lengths, count):
    """As `pagedd bench` does: the middles of as many equal parts of the range, by the logarithm."""
    least, most = (int(length) for length in (lengths.split("..") * 2)[:2])
    return [round(least * (most / least) ** ((i + 0.5) / count)) for i in range(count)]


def measured(folder, name):
    """The row of what `pagedd bench` measured."""
    path = folder / f"{name}.json"
    try:
        return json.loads(path.read_text())["rows"][0]
    except (OSError, ValueError, LookupError) as error:
        sys.exit(f"gpu_hf.py: --results: {path}: {error}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=pathlib.Path, required=True)
    parser.add_argument("--cases", default="throughput-8b:8,throughput-8b:64,throughput-8b:256,mixed-8b:64")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    try:
        import torch
        import transformers
    except ImportError as error:
        return print(f"gpu_hf.py: left out: {error}")
    cases = [(name, int(batch), measured(options.results, name)) for name, batch in (case.rsplit(":", 1) for case in options.cases.split(","))]

    torch.manual_seed(1)
    draw = random.Random(1)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(options.device):
        config = transformers.LlamaConfig(**LLAMA_3_8B, attn_implementation="sdpa")
        model = transformers.LlamaForCausalLM(config).eval()

    def run(inputs, outputs):
        """One batch; its seconds."""
        longest = max(inputs)
        ids = torch.randint(3, config.vocab_size, (len(inputs), longest), device=options.device)
        kept = torch.arange(longest, device=options.device)[None] >= longest - torch.tensor(inputs, device=options.device)[:, None]
        tokens = max(outputs)
        torch.cuda.synchronize()
        start = time.monotonic()
        out = model.generate(ids, attention_mask=kept.long(), do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens, use_cache=True)
        torch.cuda.synchronize()
        assert out.shape == (len(inputs), longest + tokens)
        return time.monotonic() - start

    print(f"transformers {transformers.__version__}, torch {torch.__version__}, {torch.cuda.get_device_name()}, bf16, sdpa, greedy")
    line = lambda values: print("  ".join(f"{v if isinstance(v, (str, int)) else f'{v:.2f}':>13}" for v in values), flush=True)
    line(HEADINGS)
    rows = []
    with torch.inference_mode():
        for name, batch, ours in cases:
            inputs, outputs = (spread(str(ours[key]), ours["num_requests"]) for key in ["input_len", "output_len"])
            draw.shuffle(inputs)
            draw.shuffle(outputs)
            # Kernels are loaded, and memory is there.
            run(inputs[:batch], [4])
            seconds = count = 0
            while count < 2 or (seconds < options.seconds and (count + 1) * batch <= len(inputs)):
                part = slice(count * batch, (count + 1) * batch)
                seconds, count = seconds + run(inputs[part], outputs[part]), count + 1
            rate = count * batch / seconds
            ratio = ours["requests_per_second"] / rate
            rows.append({"case": name, "batch": batch, "num_requests": count * batch, "elapsed_time": seconds, "requests_per_second": rate,
                         "ours_requests_per_second": ours["requests_per_second"], "ratio": ratio, "sampling": "greedy",
                         "input_len": str(ours["input_len"]), "output_len": str(ours["output_len"])})
            line([name, batch, count * batch, seconds, rate, ours["requests_per_second"], ratio])
    if options.json:
        each = ",\n".join(f"  {json.dumps(row)}" for row in rows)
        options.json.write_text(f'{{"bench": "hf", "rows": [\n{each}\n]}}\n')


if __name__ == "__main__":
    main()
