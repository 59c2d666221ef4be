"""Libraries of language models: peft, generation, trainers, sentence-transformers, timm, TRL."""
# ruff: noqa: E501 - tables of calls, as their users write them

from __future__ import annotations

import functools
import tempfile

import torch

from bench.programs.syncs_sweep.libraries import _trained

MOST = 12_000_000


def _llama(**more):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=64, bos_token_id=1, eos_token_id=63, pad_token_id=0, **more,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def each_adapter():
    import peft

    for name, kind, options in (
        ("lora", "LoraConfig", {"r": 2, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.1}),
        ("dora", "LoraConfig", {"r": 2, "target_modules": ["q_proj"], "use_dora": True}),
        ("rslora", "LoraConfig", {"r": 2, "target_modules": "all-linear", "use_rslora": True, "bias": "all"}),
        ("ia3", "IA3Config", {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
        ("loha", "LoHaConfig", {"r": 2, "target_modules": ["q_proj"]}),
        ("lokr", "LoKrConfig", {"r": 2, "target_modules": ["q_proj"]}),
        ("adalora", "AdaLoraConfig", {"target_modules": ["q_proj"], "total_step": 10}),
        ("prompt", "PromptTuningConfig", {"num_virtual_tokens": 3}),
        ("prefix", "PrefixTuningConfig", {"num_virtual_tokens": 3}),
        ("ptuning", "PromptEncoderConfig", {"num_virtual_tokens": 3, "encoder_hidden_size": 8}),
        ("vera", "VeraConfig", {"r": 2, "target_modules": ["q_proj"]}),
        ("oft", "OFTConfig", {"oft_block_size": 4, "target_modules": ["q_proj"]}),
        ("boft", "BOFTConfig", {"boft_block_size": 4, "target_modules": ["q_proj"]}),
        ("ln", "LNTuningConfig", {"target_modules": ["input_layernorm"]}),
        ("fourier", "FourierFTConfig", {"n_frequency": 4, "target_modules": ["q_proj"]}),
        ("hra", "HRAConfig", {"r": 2, "target_modules": ["q_proj"]}),
    ):
        if hasattr(peft, kind):
            yield name, functools.partial(_adapted, kind, options)


def _adapted(kind, options, device):
    import peft

    model = peft.get_peft_model(_llama(), getattr(peft, kind)(task_type="CAUSAL_LM", **options)).to(device)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    ids = torch.randint(1, 60, (2, 8)).to(device)
    losses = []
    for _ in range(2):
        loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = peft.PeftModel.from_pretrained(_llama().to(device), folder)
    made = model.eval().generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False)
    if kind in ("LoraConfig", "IA3Config"):
        merged = model.merge_and_unload()
        losses.append(merged(ids).logits)
    return losses, made, len(list(again.parameters()))


def each_generation():
    for name, options in {
        "greedy": {}, "sample": {"do_sample": True, "temperature": 0.7, "top_k": 5, "top_p": 0.9}, "beams": {"num_beams": 3, "early_stopping": True},
        "beam_sample": {"num_beams": 2, "do_sample": True}, "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
        "several": {"do_sample": True, "num_return_sequences": 2}, "scores": {"return_dict_in_generate": True, "output_scores": True},
        "no_cache": {"use_cache": False}, "static": {"cache_implementation": "static"}, "bad_words": {"bad_words_ids": [[5], [6, 7]]},
        "min_length": {"min_new_tokens": 4}, "min_p": {"do_sample": True, "min_p": 0.05}, "typical": {"do_sample": True, "typical_p": 0.9},
        "eta": {"do_sample": True, "eta_cutoff": 1e-3, "epsilon_cutoff": 1e-3}, "suppressed": {"suppress_tokens": [3, 4], "begin_suppress_tokens": [5]},
        "forced": {"forced_bos_token_id": 9, "forced_eos_token_id": 63}, "lookup": {"prompt_lookup_num_tokens": 2}, "quantized": {"cache_implementation": "dynamic"},
        "guidance": {"guidance_scale": 1.5}, "sequence_bias": {"sequence_bias": [[[7], 2.0]]}, "watermark": {"renormalize_logits": True, "remove_invalid_values": True},
        "offloaded": {"cache_implementation": "offloaded"}, "sliding": {"cache_implementation": "hybrid"},
    }.items():  # fmt: skip
        yield name, functools.partial(_generated, options)


def _generated(options, device):
    model = _llama().to(device).eval()
    ids = torch.tensor([[0, 1, 5, 9, 13], [1, 7, 7, 2, 5]]).to(device)
    if "prompt_lookup_num_tokens" in options:
        ids = ids[1:]
    made = model.generate(
        ids, attention_mask=(ids != 0).long(), **({"max_new_tokens": 6, "do_sample": False} | options)
    )
    return made if isinstance(made, torch.Tensor) else made.sequences


def streamed_generation(device):
    from transformers import StoppingCriteria, StoppingCriteriaList
    from transformers.generation.streamers import BaseStreamer

    class Kept(BaseStreamer):
        def __init__(self):
            self.ids = []

        def put(self, value):
            self.ids += value.flatten().tolist()

        def end(self):
            self.ids.append(-1)

    class Stop(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return input_ids[:, -1] == 3

    model, kept = _llama().to(device).eval(), Kept()
    ids = torch.tensor([[1, 5, 9]]).to(device)
    made = model.generate(
        ids, streamer=kept, stopping_criteria=StoppingCriteriaList([Stop()]), max_new_tokens=5, do_sample=False
    )
    return made, kept.ids


def assisted_generation(device):
    model, helper = _llama().to(device).eval(), _llama().to(device).eval()
    ids = torch.tensor([[1, 5, 9]]).to(device)
    return model.generate(ids, assistant_model=helper, max_new_tokens=6, do_sample=False)


def each_attention():
    for name in ("eager", "sdpa", "flex_attention"):
        yield name, functools.partial(_attended, name)


def _attended(name, device):
    model = _llama(attn_implementation=name).to(device)
    ids = torch.randint(1, 60, (2, 8)).to(device)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    out = model(ids, attention_mask=mask, labels=ids)
    if name != "flex_attention":
        out.loss.backward()
    return out.loss, out.logits[1]


def checkpointed_llama(device):
    model = _llama().to(device).train()
    model.gradient_checkpointing_enable()
    ids = torch.randint(1, 60, (2, 8)).to(device)
    model(ids, labels=ids, use_cache=False).loss.backward()
    return [p.grad for p in model.parameters()]


def trainer(device):
    from transformers import Trainer, TrainingArguments

    ids = torch.randint(1, 60, (8, 6))
    data = [{"input_ids": row, "labels": row} for row in ids]
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            folder, max_steps=3, per_device_train_batch_size=2, report_to=[], use_cpu=device == "cpu", logging_steps=1, save_steps=2, eval_strategy="steps",
            eval_steps=2, disable_tqdm=True, dataloader_pin_memory=True, lr_scheduler_type="cosine", warmup_steps=1, max_grad_norm=0.5,
        )  # fmt: skip
        made = Trainer(model=_llama(), args=options, train_dataset=data, eval_dataset=data[:2])
        result = made.train()
        return result.training_loss, made.evaluate()["eval_loss"], made.predict(data[:2]).predictions


def pipelines(device):
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast, pipeline

    with tempfile.TemporaryDirectory() as folder:
        with open(f"{folder}/vocab.txt", "w") as file:
            file.write("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "sea"]))
        words = BertTokenizerFast(vocab_file=f"{folder}/vocab.txt")
        model = BertForSequenceClassification(
            BertConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
        )
        ask = pipeline("text-classification", model=model, tokenizer=words, device=0 if device == "cuda" else -1)
        return [line["score"] for line in ask(["good sea", "bad"], batch_size=2)]


def loaded_onto_the_device(device):
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        _llama().save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, device_map=device, dtype=torch.bfloat16)
        model32 = AutoModelForCausalLM.from_pretrained(folder).to(device)
    ids = torch.tensor([[1, 2, 3]], device=device)
    return model(ids).logits.float().shape, str(model.device.type), model32(ids).logits


def sentences_encoded(device):
    from sentence_transformers import SentenceTransformer, losses, models
    from transformers import BertConfig, BertModel, BertTokenizerFast

    with tempfile.TemporaryDirectory() as folder:
        with open(f"{folder}/vocab.txt", "w") as file:
            file.write("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "sea"]))
        BertModel(
            BertConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
        ).save_pretrained(folder)
        BertTokenizerFast(vocab_file=f"{folder}/vocab.txt").save_pretrained(folder)
        model = SentenceTransformer(
            modules=[models.Transformer(folder), models.Pooling(8, pooling_mode="mean")], device=device
        )
    made = model.encode(["good sea", "bad", "sea sea good"], convert_to_tensor=True)
    features = [
        {key: value.to(device) for key, value in model.tokenize([text, "bad sea"]).items()}
        for text in ("good sea", "sea")
    ]
    loss = losses.MultipleNegativesRankingLoss(model)(features, None)
    loss.backward()
    return (
        made,
        model.similarity(made, made),
        loss.shape,
        model.encode(["sea"], output_value="token_embeddings")[0].shape,
    )


def each_timm():
    import timm

    seen = set()
    for name in timm.list_models():
        family = timm.models.registry.get_arch_name(name) if hasattr(timm.models, "registry") else name
        module = timm.model_entrypoint(name).__module__
        if module not in seen:
            seen.add(module)
            yield family, functools.partial(_timm, module)


def _timm(module, device):
    import timm

    names = [name for name in timm.list_models() if timm.model_entrypoint(name).__module__ == module]
    sizes = {}
    with torch.device("meta"):
        for name in names:
            try:
                sizes[name] = sum(p.numel() for p in timm.create_model(name, num_classes=5).parameters())
            except Exception:
                continue
    name = min(sizes, key=sizes.get)
    if sizes[name] > MOST:
        raise ModuleNotFoundError("too large for a sweep")
    try:
        model = timm.create_model(name, num_classes=5, img_size=64)
        size = 64
    except Exception:
        model = timm.create_model(name, num_classes=5)
        size = 96 if not model.default_cfg.get("fixed_input_size") else model.default_cfg["input_size"][-1]
    return _trained(model, [torch.randn(2, model.default_cfg["input_size"][0], size, size)], device)


def trl_losses(device):
    from trl.trainer.utils import entropy_from_logits, pad, selective_log_softmax

    logits = torch.randn(2, 4, 9).to(device).requires_grad_()
    made = selective_log_softmax(logits, torch.randint(0, 9, (2, 4)).to(device))
    made.sum().backward()
    padded = pad([torch.ones(2, device=device), torch.ones(3, device=device)], padding_value=0, padding_side="left")
    return made, logits.grad, entropy_from_logits(logits), padded


def each_trl_trainer():
    for name in ("DPOTrainer", "SFTTrainer", "RewardTrainer"):
        yield name, functools.partial(_trl, name)


def _trl(name, device):
    import trl
    from datasets import Dataset
    from transformers import BertTokenizerFast

    with tempfile.TemporaryDirectory() as folder:
        with open(f"{folder}/vocab.txt", "w") as file:
            file.write("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "sea"]))
        words = BertTokenizerFast(vocab_file=f"{folder}/vocab.txt", eos_token="[SEP]")
        rows = (
            {"prompt": ["good"] * 4, "chosen": ["sea"] * 4, "rejected": ["bad"] * 4}
            if name != "SFTTrainer"
            else {"text": ["good sea"] * 4}
        )
        options = getattr(trl, name.replace("Trainer", "Config"))(
            folder,
            max_steps=2,
            per_device_train_batch_size=2,
            report_to=[],
            use_cpu=device == "cpu",
            disable_tqdm=True,
            bf16=False,
        )
        made = getattr(trl, name)(
            model=_llama(), args=options, train_dataset=Dataset.from_dict(rows), processing_class=words
        )
        return made.train().training_loss
