#include <gradus/report/internal/page.h>

#include <array>
#include <cstdio>

#include <gradus/report/internal/report_assets.h>
#include <gradus/report/internal/text.h>

namespace gradus::report::internal {

std::string fixed(double value, int decimals) {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "%.*f", decimals, value);
  return text.data();
}

std::string tile(const std::string& label, const std::string& value, const std::string& detail) {
  return "<div class=\"tile\"><span>" + escape_html(label) + "</span><b>" + escape_html(value) +
         "</b><span>" + escape_html(detail) + "</span></div>";
}

std::string section(const std::string& title, const std::string& content) {
  return "<section><h2>" + escape_html(title) + "</h2>" + content + "</section>\n";
}

std::string key_list(const char* title,
                     const std::vector<std::pair<std::string, std::string>>& entries) {
  if (entries.empty()) return "";
  std::string rows;
  for (const auto& [key, value] : entries) {
    rows +=
        "<div><span>" + escape_html(key) + "</span><span>" + escape_html(value) + "</span></div>";
  }
  return section(title, "<div class=\"keys\">" + rows + "</div>");
}

std::string page_header(const std::string& title, const std::string& badge, bool good,
                        const std::string& line) {
  std::string html = "<header><h1>" + escape_html(title) + "</h1>";
  if (!badge.empty()) {
    html += "<span class=\"badge" + std::string(good ? "" : " warn") + "\">" + escape_html(badge) +
            "</span>";
  }
  if (!line.empty()) html += "<p>" + escape_html(line) + "</p>";
  return html + "</header>\n";
}

std::string page(const std::string& title, const std::string& body) {
  return "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">"
         // Nothing may be loaded, whatever the texts below hold.
         "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src "
         "'unsafe-inline'; "
         "script-src 'unsafe-inline'\">"
         "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"><title>" +
         escape_html(title) + "</title><style>" + kReportStyle + "</style></head><body><main>\n" +
         body +
         "<footer>Written by gradus. This file is complete in itself: it loads "
         "nothing.</footer></main><script>" +
         std::string(kReportScript) + "</script></body></html>\n";
}

}  // namespace gradus::report::internal
