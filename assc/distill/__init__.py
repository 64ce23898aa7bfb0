"""Making a draft for a target: data that the target writes, its hidden states, training, the packaged artefact."""
