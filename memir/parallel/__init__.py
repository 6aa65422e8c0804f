"""What the passes of distributed methods share: edits of flat programs, parameters as shards, units and meshes. No torch."""
