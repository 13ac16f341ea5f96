#include <gradus/report/internal/report_assets.h>

namespace gradus::report::internal {

const char* const kReportStyle = R"css(
:root{color-scheme:light dark;--page:#f6f6f4;--surface:#fff;--ink:#16181d;--soft:#5b606b;--faint:#868b96;
--border:#e2e3e6;--grid:#ebecee;--axis:#b9bcc4;--accent:#2563c9;
--blue:#2a78d6;--aqua:#1baf7a;--yellow:#e0a000;--violet:#5a48c2;--orange:#e0662f;--gray:#9a9ca3;
--limit:#c8102e;--plain:#5b606b;--good:#0a7a3d;--good-back:#e3f4e9;--warn:#8a5200;--warn-back:#fdf0d5}
@media(prefers-color-scheme:dark){:root{--page:#101216;--surface:#181b21;--ink:#eceef2;--soft:#a5abb7;--faint:#7d838f;
--border:#2b2f38;--grid:#262a32;--axis:#4a505c;--accent:#6ea8ff;
--blue:#4a94ee;--aqua:#22a878;--yellow:#cf9a14;--violet:#8f83ea;--orange:#dd6c3c;--gray:#757a85;
--limit:#ff6673;--plain:#a5abb7;--good:#5fd38d;--good-back:#15301f;--warn:#f0b95a;--warn-back:#362a12}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,"Noto Sans",sans-serif}
main{max-width:1160px;margin:0 auto;padding:32px 24px 48px}
h1{font-size:26px;line-height:1.25;margin:0;font-weight:650;letter-spacing:-.01em;overflow-wrap:anywhere}
h2{font-size:17px;margin:0 0 14px;font-weight:600}
header{display:flex;flex-wrap:wrap;gap:6px 14px;align-items:baseline;margin-bottom:22px}
header p{margin:0;color:var(--soft);flex-basis:100%}
.badge{font-size:13px;font-weight:550;border-radius:99px;padding:2px 11px;background:var(--good-back);color:var(--good)}
.badge.warn{background:var(--warn-back);color:var(--warn)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(190px,1fr));gap:14px;margin-bottom:18px}
.tile,section{background:var(--surface);border:1px solid var(--border);border-radius:10px}
.tile{padding:14px 16px}
.tile b{display:block;font-size:23px;line-height:1.3;font-weight:620;letter-spacing:-.01em;white-space:nowrap}
.tile span{display:block;color:var(--soft);font-size:13px}
section{padding:20px 22px;margin-top:18px;min-width:0}
.pair{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:18px;margin-top:18px}
.pair section{margin-top:0}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:7px 12px 7px 0;border-bottom:1px solid var(--border);vertical-align:top;
overflow-wrap:anywhere}
tr:last-child>th,tr:last-child>td{border-bottom:0}
tbody th{font-weight:400;color:var(--soft);width:34%}
thead th{font-weight:550;font-size:13px;color:var(--soft)}
td.number,th.number{text-align:right;white-space:nowrap;overflow-wrap:normal}
.keys th,.keys td{font:13px/1.5 ui-monospace,"SFMono-Regular",Menlo,Consolas,"DejaVu Sans Mono",monospace}
.keys{columns:2;column-gap:40px}
.keys div{display:flex;gap:16px;justify-content:space-between;break-inside:avoid;padding:5px 0;
border-bottom:1px solid var(--border);font:13px/1.5 ui-monospace,"SFMono-Regular",Menlo,Consolas,"DejaVu Sans Mono",monospace}
.keys div>span:first-child{color:var(--soft)}
.keys div>span:last-child{text-align:right;overflow-wrap:anywhere;min-width:0}
.breakdown tbody th{width:auto;color:var(--ink);white-space:nowrap}
.breakdown td.share{width:45%}
.swatch{display:inline-block;width:11px;height:11px;border-radius:3px;background:var(--c);margin-right:8px}
.track{display:block;height:11px;margin-top:6px;border-radius:3px;background:var(--grid)}
.fill{display:block;height:100%;border-radius:3px;background:var(--c);min-width:2px}
.breakdown tfoot td,.breakdown tfoot th{font-weight:600;border-top:2px solid var(--border)}
.bars{display:grid;grid-template-columns:auto 1fr;gap:9px 14px;align-items:center}
.bars span{font-size:14px}.bars .fill,.bars .track{height:20px;margin:0}.bars .value{display:flex;gap:10px;align-items:center;min-width:0}
.bars .value .fill{flex:none}.bars .value em{font-style:normal;white-space:nowrap;font-variant-numeric:tabular-nums}
.chart{margin:0;min-width:0}
.chart figcaption{font-size:17px;font-weight:600;margin-bottom:8px}
.chart-head{display:flex;flex-wrap:wrap;justify-content:space-between;gap:4px 20px;margin-bottom:10px;font-size:13px;color:var(--soft)}
.legend{display:flex;flex-wrap:wrap;gap:3px 16px;list-style:none;margin:0;padding:0}
.legend i{display:inline-block;width:16px;height:3px;border-radius:2px;background:var(--c);margin-right:7px;vertical-align:middle}
.legend i.faint{opacity:.45;height:2px}
.legend i.swatch{width:11px;height:11px;border-radius:3px;vertical-align:-1px}
.axes{display:grid;grid-template-columns:54px minmax(0,1fr);grid-template-rows:260px 24px}
.wide .axes{grid-template-rows:330px 24px}
.pair .axes{grid-template-rows:210px 24px}
.y-axis{position:relative}
.y-axis span{position:absolute;right:9px;transform:translateY(-50%);font-size:12px;color:var(--soft);
font-variant-numeric:tabular-nums;white-space:nowrap}
.x-axis{position:relative;grid-column:2}
.x-axis span{position:absolute;top:5px;transform:translateX(-50%);font-size:12px;color:var(--soft);
font-variant-numeric:tabular-nums;white-space:nowrap}
.x-label{text-align:center;font-size:13px;color:var(--soft);padding-left:54px}
.plot{position:relative;border-bottom:1px solid var(--axis);outline-offset:3px;touch-action:pan-y;cursor:crosshair}
.plot:focus:not(:focus-visible){outline:0}
.plot svg{position:absolute;inset:0;width:100%;height:100%;display:block;overflow:visible}
.plot path{fill:none;vector-effect:non-scaling-stroke;stroke-linejoin:round;stroke-linecap:round}
.plot .grid{stroke-width:1}
.plot .line{stroke-width:2}
.plot .faint{stroke-width:1;opacity:.38}
.plot .dots{stroke-width:7}
.plot .area{fill:currentColor;stroke:currentColor;stroke-width:1}
.plot .reference{stroke-width:1.6;stroke-dasharray:6 4;stroke-linecap:butt}
.plot .phase{stroke-width:1;stroke-dasharray:2 3}
.reference-label,.phase-label{position:absolute;font-size:12px;line-height:16px;white-space:nowrap;pointer-events:none}
.reference-label{right:4px;transform:translateY(calc(-100% - 2px));color:var(--c);font-weight:600;padding:0 5px;
background:color-mix(in srgb,var(--surface) 82%,transparent);border-radius:4px}
.reference-label.left{right:auto;left:4px}
.reference-label.below{transform:translateY(3px)}
.with-phases{margin-top:24px}
.phase-label{top:-20px;text-align:center;overflow:hidden;text-overflow:ellipsis;color:var(--soft);padding:0 3px}
.cursor{position:absolute;top:0;bottom:0;width:1px;background:var(--soft);pointer-events:none}
.knob{position:absolute;width:9px;height:9px;margin:-4.5px;border-radius:50%;border:2px solid var(--surface);pointer-events:none}
.tip{position:absolute;z-index:2;top:6px;pointer-events:none;background:var(--surface);border:1px solid var(--border);
border-radius:7px;box-shadow:0 3px 14px rgba(0,0,0,.16);padding:7px 10px;font-size:12.5px;line-height:1.5;
white-space:nowrap;font-variant-numeric:tabular-nums}
.tip div{display:flex;gap:14px;justify-content:space-between}
.tip i{display:inline-block;width:9px;height:9px;border-radius:2px;margin-right:6px}
.tip .head{color:var(--soft)}.tip .sum{border-top:1px solid var(--border);margin-top:3px;padding-top:3px}
.scroll{overflow-x:auto}
.plans th{white-space:nowrap;overflow-wrap:normal}.plans tbody th{width:auto;color:var(--ink)}.plans td,.plans th{padding-right:12px;font-size:13px}
.plans .chosen th,.plans .chosen td{font-weight:650}.plans .pale th,.plans .pale td{color:var(--soft)}
.note{margin:8px 0 0;color:var(--soft);font-size:13px}
.empty{color:var(--faint);margin:0;padding:56px 0;text-align:center;border:1px dashed var(--border);border-radius:8px}
pre{margin:0;white-space:pre-wrap;overflow-wrap:anywhere;font:14px/1.6 ui-serif,Georgia,"Noto Serif","DejaVu Serif",serif}
pre .prompt{color:var(--accent);font-weight:600}
footer{margin-top:22px;color:var(--faint);font-size:13px}
@media(max-width:820px){.pair{grid-template-columns:minmax(0,1fr)}}
@media(max-width:560px){main{padding:20px 12px 32px}section{padding:16px 14px}h1{font-size:22px}
.tiles{grid-template-columns:repeat(2,minmax(0,1fr));gap:10px}.tile{padding:11px 12px}.tile b{font-size:18px;white-space:normal}
.keys{columns:1}.x-axis .odd,.phase-label.narrow{display:none}.axes{grid-template-columns:46px minmax(0,1fr)}.x-label{padding-left:46px}
.breakdown td.share{display:none}.breakdown th.share{display:none}.wide .axes{grid-template-rows:260px 24px}
.bars{grid-template-columns:minmax(0,1fr);gap:3px}.bars .value{margin-bottom:8px}}
@media print{body{background:#fff}section,.tile{break-inside:avoid}}
)css";

const char* const kReportScript = R"js(
(function(){
"use strict";
function digits(v){
  var a=Math.abs(v);
  if(a>=1000)return v.toLocaleString("en-US",{maximumFractionDigits:a>=1e5?0:1});
  if(a!==0&&a<1e-3)return v.toExponential(3);
  return String(parseFloat(v.toPrecision(5)));
}
function bytes(v){
  var units=["B","KiB","MiB","GiB","TiB"],u=0;
  while(Math.abs(v)>=1024&&u<4){v/=1024;u++;}
  return v.toFixed(u?1:0)+" "+units[u];
}
function make(parent,tag,name){
  var e=document.createElement(tag);
  if(name)e.className=name;
  parent.appendChild(e);
  return e;
}
function nearest(xs,x,before){
  var low=0,high=xs.length-1;
  while(low<high){var mid=(low+high+1)>>1;if(xs[mid]<=x)low=mid;else high=mid-1;}
  if(!before&&low+1<xs.length&&xs[low+1]-x<x-xs[low])low++;
  return low;
}
document.querySelectorAll("figure.chart").forEach(function(figure){
  var source=figure.querySelector("script"),plot=figure.querySelector(".plot");
  if(!source||!plot)return;
  var d=JSON.parse(source.textContent),format=d.bytes?bytes:digits,parts=[],current=null;
  var longest=d.series.reduce(function(a,s){return s.x.length>a.x.length?s:a;},d.series[0]);
  function clear(){parts.forEach(function(e){e.remove();});parts=[];}
  function height(v){
    return d.log?Math.log(v/d.y0)/Math.log(d.y1/d.y0):(v-d.y0)/(d.y1-d.y0);
  }
  function row(tip,color,name,value,style){
    var line=make(tip,"div",style),label=make(line,"span");
    if(color)make(label,"i").style.background=color;
    label.appendChild(document.createTextNode(name));
    make(line,"span").textContent=value;
  }
  function show(index){
    clear();
    current=index;
    var x=longest.x[index],left=100*(x-d.x0)/(d.x1-d.x0),total=0;
    var cursor=make(plot,"div","cursor"),tip=make(plot,"div","tip");
    cursor.style.left=left+"%";
    parts.push(cursor,tip);
    row(tip,"",d.xl,digits(x),"head");
    var order=d.stacked?d.series.slice().reverse():d.series;
    order.forEach(function(s){
      if(!s.x.length)return;
      var i=nearest(s.x,x,d.stacked),v=s.y[i];
      var far=Math.abs(s.x[i]-x)>(d.x1-d.x0)/200;
      if(!d.stacked&&far)return;
      row(tip,s.color,s.name,v===null?"not finite":format(v));
      total+=v||0;
      if(d.stacked||v===null||(d.log&&v<=0))return;
      var knob=make(plot,"div","knob");
      knob.style.background=s.color;
      knob.style.left=100*(s.x[i]-d.x0)/(d.x1-d.x0)+"%";
      knob.style.top=100-100*height(v)+"%";
      parts.push(knob);
    });
    if(d.stacked)row(tip,"","total",format(total),"sum");
    var room=plot.clientWidth,at=left/100*room;
    var place=at+tip.offsetWidth+16<room?at+12:at-tip.offsetWidth-12;
    tip.style.left=Math.max(0,Math.min(place,room-tip.offsetWidth))+"px";
  }
  function point(event){
    var box=plot.getBoundingClientRect();
    show(nearest(longest.x,d.x0+(event.clientX-box.left)/box.width*(d.x1-d.x0),d.stacked));
  }
  plot.addEventListener("pointermove",point);
  plot.addEventListener("pointerdown",point);
  plot.addEventListener("pointerleave",function(e){if(e.pointerType==="mouse")clear();});
  plot.addEventListener("blur",clear);
  plot.addEventListener("keydown",function(event){
    var move={ArrowLeft:-1,ArrowRight:1,Home:-1e9,End:1e9}[event.key];
    if(event.key==="Escape")clear();
    if(!move)return;
    event.preventDefault();
    var from=current===null?(move>0?-1:longest.x.length):current;
    show(Math.max(0,Math.min(longest.x.length-1,from+move)));
  });
});
})();
)js";

}  // namespace gradus::report::internal
