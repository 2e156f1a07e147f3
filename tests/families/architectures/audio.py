"""Models that hear or make sounds."""

from __future__ import annotations

from tests.families.architectures.architecture import TOKENS, Architecture

WAVES = {
    "vocab_size": 20,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 24,
    "conv_dim": [8, 8],
    "conv_kernel": [4, 3],
    "conv_stride": [4, 2],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}
STABLE = WAVES | {"do_stable_layer_norm": True}
BIASED = {"num_buckets": 8, "max_bucket_distance": 12}
SEQ2SEQ = TOKENS | {
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 24,
    "decoder_layers": 3,
    "decoder_attention_heads": 8,
    "decoder_ffn_dim": 24,
    "decoder_start_token_id": 1,
}
SPEECHT5 = {
    **WAVES,
    **SEQ2SEQ,
    "max_speech_positions": 64,
    "max_text_positions": 64,
    "encoder_max_relative_position": 6,
    # After more layers, all tokens are alike and attention is uniform.
    "decoder_layers": 2,
    "num_mel_bins": 8,
    "speech_decoder_prenet_units": 16,
    "speech_decoder_postnet_units": 16,
    "reduction_factor": 2,
}
SOUND = {
    "vocab_size": 16,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "ffn_dim": 24,
    "num_codebooks": 2,
    "pad_token_id": 16,
    "bos_token_id": 16,
    "max_position_embeddings": 64,
}
MUSICGEN = {
    "text_encoder": TOKENS
    | {
        "model_type": "t5",
        "d_model": 48,
        "num_heads": 4,
        "d_kv": 12,
        "d_ff": 24,
        "num_layers": 2,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 12,
    },
    "audio_encoder": {
        "model_type": "encodec",
        "num_filters": 4,
        "hidden_size": 8,
        "codebook_size": 16,
        "codebook_dim": 8,
        "upsampling_ratios": [2, 2],
        "num_lstm_layers": 1,
    },
    "decoder": SOUND,
}

SELF, DECODER, CROSS = ("encoder", "self"), ("decoder", "self"), ("decoder", "cross")

AUDIO = [
    Architecture("wav2vec2", "Wav2Vec2ForCTC", WAVES, {SELF: 2}),
    Architecture("wav2vec2-large", "Wav2Vec2Model", STABLE, {SELF: 2}),
    Architecture("mms", "Wav2Vec2ForCTC", STABLE | {"adapter_attn_dim": 8}, {SELF: 2}),
    Architecture("hubert", "HubertModel", WAVES, {SELF: 2}),
    Architecture("hubert-large", "HubertForCTC", STABLE, {SELF: 2}),
    Architecture("wavlm", "WavLMModel", WAVES | BIASED, {SELF: 2}),
    Architecture("wavlm-large", "WavLMForCTC", STABLE | BIASED, {SELF: 2}),
    Architecture("unispeech", "UniSpeechModel", STABLE, {SELF: 2}),
    Architecture("unispeech-sat", "UniSpeechSatModel", WAVES, {SELF: 2}),
    Architecture("unispeech-sat-large", "UniSpeechSatForCTC", STABLE, {SELF: 2}),
    Architecture("data2vec-audio", "Data2VecAudioModel", WAVES, {SELF: 2}),
    Architecture(
        "audio-spectrogram-transformer",
        "ASTForAudioClassification",
        {
            "hidden_size": 32,
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "intermediate_size": 24,
            "patch_size": 4,
            "frequency_stride": 4,
            "time_stride": 4,
            "max_length": 24,
            "num_mel_bins": 16,
        },
        {SELF: 2},
    ),
    Architecture(
        "speech-to-text",
        "Speech2TextForConditionalGeneration",
        SEQ2SEQ | {"d_model": 32, "input_feat_per_channel": 10, "conv_channels": 16},
        {SELF: 2, DECODER: 3, CROSS: 3},
    ),
    Architecture(
        "whisper",
        "WhisperForConditionalGeneration",
        SEQ2SEQ
        | {
            "d_model": 32,
            "num_mel_bins": 8,
            "max_source_positions": 20,
            "max_target_positions": 32,
        },
        {SELF: 2, DECODER: 3, CROSS: 3},
    ),
    Architecture("speecht5", "SpeechT5ForSpeechToText", SPEECHT5, {SELF: 2, DECODER: 2, CROSS: 2}),
    Architecture(
        "speecht5-speech", "SpeechT5ForTextToSpeech", SPEECHT5, {SELF: 2, DECODER: 2, CROSS: 2}
    ),
    Architecture(
        "musicgen",
        "MusicgenForConditionalGeneration",
        MUSICGEN,
        {("text-encoder", "self"): 2, DECODER: 3, CROSS: 3},
    ),
    Architecture(
        "musicgen-melody",
        "MusicgenMelodyForConditionalGeneration",
        MUSICGEN,
        {("text-encoder", "self"): 2, DECODER: 3},
    ),
    Architecture("musicgen-decoder", "MusicgenForCausalLM", SOUND, {DECODER: 3, CROSS: 3}),
    Architecture("musicgen-melody-decoder", "MusicgenMelodyForCausalLM", SOUND, {DECODER: 3}),
]
