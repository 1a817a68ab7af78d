"""Skills: folders of instructions and scripts, each explained in its SKILL.md, which containers hold for a model."""
