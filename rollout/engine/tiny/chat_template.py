"""The chat format as a Jinja template, for engines and tools that ask a checkpoint for one.

It gives the ids of `renderers`' Qwen3 renderer, with thinking on and off. Two points differ from
Qwen's own template: content must be a string, and with thinking off the empty think block stays
on every assistant turn that has no reasoning, because each such turn was sampled behind one.
"""

from __future__ import annotations

CHAT_TEMPLATE = r"""
{%- set off = enable_thinking is defined and enable_thinking is false -%}
{%- set head = messages[0].content if messages[0].role == 'system' else none -%}
{%- set place = namespace(query=messages | length - 1, found=false) -%}
{%- for message in messages | reverse -%}
  {%- if not place.found and message.role == 'user' and message.content is string -%}
    {%- set text = message.content | trim -%}
    {%- if not (text.startswith('<tool_response>') and text.endswith('</tool_response>')) -%}
      {%- set place.found = true -%}
      {%- set place.query = messages | length - 1 - loop.index0 -%}
    {%- endif -%}
  {%- endif -%}
{%- endfor -%}
{%- if tools -%}
  {{- '<|im_start|>system\n' -}}
  {%- if head is not none -%}{{- head + '\n\n' -}}{%- endif -%}
  {{- '# Tools\n\nYou may call one or more functions to assist with the user query.\n\n' -}}
  {{- 'You are provided with function signatures within <tools></tools> XML tags:\n<tools>' -}}
  {%- for tool in tools -%}{{- '\n' + (tool | tojson) -}}{%- endfor -%}
  {{- '\n</tools>\n\nFor each function call, return a json object with function name and arguments ' -}}
  {{- 'within <tool_call></tool_call> XML tags:\n<tool_call>\n' -}}
  {{- '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n' -}}
{%- elif head is not none -%}
  {{- '<|im_start|>system\n' + head + '<|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {%- set content = message.content if message.content is string else '' -%}
  {%- if message.role == 'user' or (message.role == 'system' and not loop.first) -%}
    {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' -}}
  {%- elif message.role == 'assistant' -%}
    {%- set turn = namespace(thought='', said=content) -%}
    {%- if message.reasoning_content is string -%}
      {%- set turn.thought = message.reasoning_content -%}
    {%- elif '</think>' in content -%}
      {%- set before = content.split('</think>')[0] -%}
      {%- set turn.said = content[(before + '</think>') | length:].lstrip('\n') -%}
      {%- set turn.thought = before.split('<think>')[-1].lstrip('\n').rstrip('\n') -%}
    {%- endif -%}
    {{- '<|im_start|>assistant\n' -}}
    {%- set shown = loop.index0 > place.query and (loop.last or turn.thought) -%}
    {%- if shown or (off and not turn.thought) -%}
      {{- '<think>\n' + turn.thought.strip('\n') + '\n</think>\n\n' + turn.said.lstrip('\n') -}}
    {%- else -%}
      {{- turn.said -}}
    {%- endif -%}
    {%- for call in message.tool_calls or [] -%}
      {%- if turn.said or not loop.first -%}{{- '\n' -}}{%- endif -%}
      {%- set function = call.function or call -%}
      {%- set arguments = function.arguments -%}
      {{- '<tool_call>\n{"name": "' + function.name + '", "arguments": ' -}}
      {{- (arguments if arguments is string else arguments | tojson) + '}\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\n' -}}
  {%- elif message.role == 'tool' -%}
    {%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
    {{- '\n<tool_response>\n' + content + '\n</tool_response>' -}}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\n' -}}{%- endif -%}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\n' -}}
  {%- if off -%}{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}
{%- endif -%}
""".strip()
