"""Images and videos as users name them: opened from paths, URLs, data URIs and bytes, within limits."""
