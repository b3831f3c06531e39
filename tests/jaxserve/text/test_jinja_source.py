import pytest
from hypothesis import given, strategies

from jaxserve.text.jinja_source import translate


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a {{ x }} {% if y %}{# c #}{% endif %}", "a {{ x }} {% if y %}{# c #}{% endif %}"),
        ("{{ x.strip() }}", "{{ call_method(x, 'strip') }}"),
        ("{{- x.split(',', 1)[0] -}}", "{{- call_method(x, 'split',',', 1)[0] -}}"),
        ("{{ a ~ m['c'].d(1).strip() }}", "{{ a ~ call_method(m['c'].d(1), 'strip') }}"),
        ("{{ not (x or 'y').strip() }}", "{{ not call_method((x or 'y'), 'strip') }}"),
        ("{{ a in [b].index(c) }}", "{{ a in call_method([b], 'index',c) }}"),
        (
            "{{ x.strip('\\n').lower() }}",
            "{{ call_method(call_method(x, 'strip',\"\\n\"), 'lower') }}",
        ),
        ("{{ x.strip().y }}{{ x.strip }}", "{{ call_method(x, 'strip').y }}{{ x.strip }}"),
        ("{{ x.get('a').items() }}", "{{ x.get('a').items() }}"),
        ("{{ m[::-1] | length }}", "{{ call_method(m, '[::-1]') | length }}"),
        ("{{ '.strip()' }}{# x.strip() #}", "{{ '.strip()' }}{# x.strip() #}"),
        ("x.strip() }}", "x.strip() }}"),
        ("{{ x | default('a', boolean=true) }}", "{{ x | default('a',true) }}"),
        (
            "{% if x.y is not iterable and z|tojson %}",
            "{% if x.y |default(undefined_value) is not iterable and "
            "z|default(undefined_value) |tojson %}",
        ),
        ("{{ x is string }}{{ tojson }}", "{{ x is string }}{{ tojson }}"),
        ("{{ f(boolean == 1) }}", "{{ f(boolean == 1) }}"),
        ("{%- generation %}a{% endgeneration -%}", "{%- with %}a{% endwith -%}"),
        ("{{ generation }}", "{{ generation }}"),
        ("{% raw %}\n{{ x.strip() }}{% endraw %}", "{% raw %}\n\n{{ x.strip() }}{% endraw %}"),
        ("a\r\nb\rc", "a\nb\nc"),
        ("{{ '\\x41\\'' }}", '{{ "A\'" }}'),
        ("{{ 'ab\ncd' }}", "{{ 'ab\ncd' }}"),
        ("{{ {'a': {}}.a.strip() }} }}", "{{ call_method({'a': {}}.a, 'strip') }} }}"),
        ("{{ x.strip(", "{{ call_method(x, 'strip',"),
        ("{{ 'abc", "{{ 'abc"),
        ("{# abc", "{# abc"),
    ],
)
def test_translations(source: str, expected: str) -> None:
    assert translate(source) == expected


@given(strategies.text(alphabet="{}%#x.strip()[:-1]'\"\\ \n", max_size=60))
def test_lines_stay_where_they_are(source: str) -> None:
    if "raw" not in source and "\\" not in source:
        assert translate(source).count("\n") == source.count("\n")


@given(strategies.text(alphabet="abc {}\n"))
def test_text_outside_of_code_is_untouched(text: str) -> None:
    if "{{" not in text:
        assert translate(text) == text
