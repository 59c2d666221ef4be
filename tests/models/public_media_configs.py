"""Public encoders, encoder-decoders and models with sight, see ``public_configs``."""

from __future__ import annotations

from typing import Any

TEXT: dict[str, Any] = {
    "vocab_size": 120, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 130,
}  # fmt: skip
_BERT = TEXT | {
    "attention_probs_dropout_prob": 0.1, "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "initializer_range": 0.02,
    "layer_norm_eps": 1e-12, "pad_token_id": 0, "position_embedding_type": "absolute", "type_vocab_size": 2, "use_cache": True,
    "classifier_dropout": None, "gradient_checkpointing": False,
}  # fmt: skip
_ROBERTA = _BERT | {
    "bos_token_id": 0, "eos_token_id": 2, "layer_norm_eps": 1e-5, "pad_token_id": 1, "type_vocab_size": 1, "output_past": True,
}  # fmt: skip
_ONE_LABEL = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
_MODERN = TEXT | {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1, "classifier_activation": "gelu",
    "classifier_bias": False,
    "classifier_dropout": 0.0, "classifier_pooling": "mean", "cls_token_id": 1, "decoder_bias": True, "embedding_dropout": 0.0,
    "deterministic_flash_attn": False, "eos_token_id": 2, "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0,
    "gradient_checkpointing": False, "hidden_activation": "gelu", "initializer_cutoff_factor": 2.0, "layer_norm_eps": 1e-5,
    "local_attention": 128, "local_rope_theta": 10000.0, "mlp_bias": False, "mlp_dropout": 0.0, "norm_bias": False,
    "norm_eps": 1e-5, "num_hidden_layers": 5, "pad_token_id": 0, "position_embedding_type": "absolute", "sep_token_id": 2,
}  # fmt: skip
POOL: dict[str, tuple[str, dict[str, Any]]] = {
    "bert-base-uncased": ("BertForMaskedLM", _BERT),
    "all-MiniLM-L6-v2": ("BertModel", _BERT),
    "ms-marco-MiniLM-L6-v2": ("BertForSequenceClassification", _BERT | _ONE_LABEL),
    "roberta-base": ("RobertaForMaskedLM", _ROBERTA),
    "camembert-base": ("CamembertForMaskedLM", _ROBERTA | {"bos_token_id": 5, "eos_token_id": 6}),
    "bge-m3": ("XLMRobertaModel", _ROBERTA),
    "bge-reranker-v2-m3": ("XLMRobertaForSequenceClassification", _ROBERTA | _ONE_LABEL),
    "electra-small-discriminator": ("ElectraModel", _BERT | {
        "embedding_size": 20, "summary_activation": "gelu", "summary_last_dropout": 0.1, "summary_type": "first",
        "summary_use_proj": True}),
    "albert-base-v2": ("AlbertForMaskedLM", _BERT | {
        "bos_token_id": 2, "classifier_dropout_prob": 0.1, "down_scale_factor": 1, "embedding_size": 20, "eos_token_id": 3,
        "gap_size": 0, "hidden_act": "gelu_new", "inner_group_num": 1, "net_structure_type": 0, "num_hidden_groups": 1,
        "num_memory_blocks": 0, "layers_to_keep": []}),
    "distilbert-base-uncased-finetuned-sst-2": ("DistilBertForSequenceClassification", {
        "activation": "gelu", "attention_dropout": 0.1, "dim": 32, "dropout": 0.1, "finetuning_task": "sst-2", "hidden_dim": 48,
        "id2label": {"0": "NEGATIVE", "1": "POSITIVE"}, "initializer_range": 0.02, "label2id": {"NEGATIVE": 0, "POSITIVE": 1},
        "max_position_embeddings": 130, "n_heads": 4, "n_layers": 2, "output_past": True, "pad_token_id": 0, "qa_dropout": 0.1,
        "seq_classif_dropout": 0.2, "sinusoidal_pos_embds": False, "tie_weights_": True, "vocab_size": 120}),
    "ModernBERT-base": ("ModernBertForMaskedLM", _MODERN | {"sparse_pred_ignore_index": -100, "sparse_prediction": False,
                                                            "repad_logits_with_grad": False, "tie_word_embeddings": True}),
    "gte-reranker-modernbert-base": ("ModernBertForSequenceClassification", _MODERN | _ONE_LABEL),
    "deberta-v3-base": ("DebertaV2ForSequenceClassification", _BERT | {
        "layer_norm_eps": 1e-7, "max_relative_positions": -1, "norm_rel_ebd": "layer_norm", "pos_att_type": "p2c|c2p",
        "position_biased_input": False, "position_buckets": 8, "relative_attention": True, "share_att_key": True,
        "type_vocab_size": 0}),
    "all-mpnet-base-v2": ("MPNetModel", _BERT | {"type_vocab_size": 1, "bos_token_id": 0, "eos_token_id": 2,
        "layer_norm_eps": 1e-5,
        "pad_token_id": 1,
                                                 "relative_attention_num_buckets": 32}),
    "embeddinggemma-300m": ("Gemma3TextModel", TEXT | {
        "_sliding_window_pattern": 6, "attention_bias": False, "attn_logit_softcapping": None, "bos_token_id": 2,
        "eos_token_id": 1, "final_logit_softcapping": None, "head_dim": 16, "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": ["sliding_attention", "full_attention"], "num_key_value_heads": 1, "pad_token_id": 0,
        "query_pre_attn_scalar": 16, "rms_norm_eps": 1e-6, "rope_local_base_freq": 10000.0, "rope_scaling": None,
        "rope_theta": 1000000.0, "sliding_window": 512, "use_bidirectional_attention": True}),
    "Skywork-Reward-Llama-3.1-8B": ("LlamaForSequenceClassification", TEXT | _ONE_LABEL | {
        "attention_bias": False, "bos_token_id": 1, "eos_token_id": 2, "head_dim": 8, "mlp_bias": False,
        "num_key_value_heads": 2,
        "pad_token_id": 0, "pretraining_tp": 1, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
        "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3",
                         "original_max_position_embeddings": 8192}}),
}  # fmt: skip
"""name -> architecture, and what its config.json says."""
_BART = {
    "activation_dropout": 0.1, "activation_function": "gelu", "attention_dropout": 0.1, "bos_token_id": 0, "d_model": 32,
    "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "decoder_layerdrop": 0.0, "decoder_layers": 2, "dropout": 0.1,
    "decoder_start_token_id": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48, "encoder_layerdrop": 0.0,
    "encoder_layers": 2, "eos_token_id": 2, "is_encoder_decoder": True, "max_position_embeddings": 64, "num_hidden_layers": 2,
    "pad_token_id": 1, "scale_embedding": False, "vocab_size": 120, "init_std": 0.02, "normalize_before": False,
    "add_bias_logits": False, "add_final_layer_norm": False, "normalize_embedding": True, "static_position_embeddings": False,
    "gradient_checkpointing": False, "no_repeat_ngram_size": 3, "early_stopping": True, "num_beams": 4,
}  # fmt: skip
_T5 = {
    "d_ff": 48, "d_kv": 8, "d_model": 32, "decoder_start_token_id": 0, "dropout_rate": 0.1, "eos_token_id": 1,
    "n_positions": 512,
    "initializer_factor": 1.0, "is_encoder_decoder": True, "layer_norm_epsilon": 1e-6, "num_heads": 4, "num_layers": 2,
    "output_past": True, "pad_token_id": 0, "relative_attention_num_buckets": 32, "vocab_size": 120,
    "task_specific_params": {"summarization": {"early_stopping": True, "prefix": "summarize: "}},
}  # fmt: skip
READ: dict[str, tuple[str, dict[str, Any]]] = {
    "bart-large-cnn": ("BartForConditionalGeneration", _BART | {"force_bos_token_to_be_generated": True,
        "length_penalty": 2.0}),
    "mbart-large-50-many-to-many": ("MBartForConditionalGeneration", _BART | {
        "activation_function": "relu", "add_final_layer_norm": True, "normalize_before": True, "scale_embedding": True}),
    "t5-small": ("T5ForConditionalGeneration", _T5),
    "flan-t5-base": ("T5ForConditionalGeneration", _T5 | {
        "dense_act_fn": "gelu_new", "feed_forward_proj": "gated-gelu", "is_gated_act": True, "n_positions": 512,
        "num_decoder_layers": 3, "relative_attention_max_distance": 128, "tie_word_embeddings": False}),
    "mt5-small": ("MT5ForConditionalGeneration", _T5 | {
        "feed_forward_proj": "gated-gelu", "num_heads": 3, "tie_word_embeddings": False, "tokenizer_class": "T5Tokenizer"}),
    "whisper-tiny": ("WhisperForConditionalGeneration", {
        "activation_dropout": 0.0, "activation_function": "gelu", "attention_dropout": 0.0, "begin_suppress_tokens": None,
        "bos_token_id": 1, "d_model": 32, "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "decoder_layerdrop": 0.0,
        "decoder_layers": 2, "decoder_start_token_id": 3, "dropout": 0.0, "encoder_attention_heads": 2, "encoder_ffn_dim": 48,
        "encoder_layerdrop": 0.0, "encoder_layers": 2, "eos_token_id": 2, "forced_decoder_ids": [[1, 5], [2, 6]],
        "init_std": 0.02, "is_encoder_decoder": True, "max_length": 448, "max_source_positions": 15, "max_target_positions": 60,
        "num_hidden_layers": 2, "num_mel_bins": 8, "pad_token_id": 0, "scale_embedding": False, "suppress_tokens": None,
        "use_cache": True, "vocab_size": 120}),
}  # fmt: skip
