"""Chat templates in the manner of those that checkpoints ship."""

from __future__ import annotations

QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == "user" %}{%- set ns.last = (messages|length - 1) - loop.index0 %}{% break %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}{%- set content = message.content %}
    {%- else %}{%- set content = '' %}{%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

LLAMA = """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system_message = "" %}{%- endif %}
{{- "<|start|>system\\nToday: " ~ date_string ~ "\\n" + system_message + "<|eot|>" }}
{%- for message in messages %}
    {%- generation %}
        {{- '<|start|>' + message['role'] + '\\n' + message['content'] | trim + '<|eot|>' }}
    {%- endgeneration %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant\\n' }}{%- endif %}"""

STRICT = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{{ '<turn>' ~ message['role'] ~ '\\n' ~ message['content'] | trim ~ '</turn>\\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<turn>model\\n' }}{% endif %}"""

LLAVA = (
    "{% for message in messages %}{{ message['role'].upper() }}: "
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\\n' }}{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] }} {% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)

EITHER = """{%- macro shown(content) %}{%- if content is string %}{{- content }}
{%- else %}{%- for item in content %}{%- if 'text' in item %}{{- item.text }}{%- endif %}{%- endfor %}{%- endif %}
{%- endmacro %}
{%- for message in messages %}{{- message.role ~ ': ' ~ shown(message.content) ~ '\\n' }}{%- endfor %}"""

LISTS = "{% for m in messages %}{{ m.role }}: {% for part in m.content %}{{ part.text }}|{% endfor %}{% endfor %}"

TEXTS = {"qwen": QWEN, "llama": LLAMA, "strict": STRICT}
PARTS = {"llava": LLAVA, "either": EITHER, "lists": LISTS}
