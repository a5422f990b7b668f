"""The store from and to the folders of other EAGLE-3 tools.

    speculators_v1  data_{i}.pt                             speculators 0.3 to 0.7
    speculators     Arrow + hidden_states/hs_{row}.safetensors  speculators 0.5 and later
    specforge       rows_*/data_{i}.ckpt[.gz]               SpecForge

Each module says how its tool names layers and which final state it keeps; `importer` and `exporter` convert, and say
what they did. Ids, masks and aux states in bf16 come out exactly as they went in.
"""
