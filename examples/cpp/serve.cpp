// Serves a package: calls its first program once for each line of input, and says how long each took.
//     serve PACKAGE [--key FILE] [--torch FOLDER] [FILE...]
// A file for each argument of the program, its elements row by row, of fixed sizes. --key: the 32 bytes of the Ed25519
// key that the package must be signed by. --torch: where libtorch_cpu.so is, for a package that is not standalone.
#include <fusewright.hpp>

#include <chrono>
#include <fstream>
#include <iostream>
#include <iterator>

using Clock = std::chrono::steady_clock;

static double since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

static std::vector<char> content(const char *path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) throw std::runtime_error(std::string("cannot read ") + path);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

int main(int count, char **words) {
    if (count < 2) return std::cerr << "serve PACKAGE [--key FILE] [--torch FOLDER] [FILE...]\n", 2;
    try {
        int first = 2;
        std::vector<char> key;
        for (std::string word; first + 1 < count && (word = words[first], word == "--key" || word == "--torch"); first += 2)
            if (word == "--key") key = content(words[first + 1]);
            else fusewright::use_torch(words[first + 1]);
        auto start = Clock::now();
        fusewright::Package package(words[1], std::string(key.begin(), key.end()));
        std::cout << "loaded " << since(start) << std::endl;
        std::vector<std::vector<char>> memory;
        std::vector<fw_tensor> inputs;
        for (int i = first; i < count; i++) {
            fw_tensor input;
            fusewright::check(fw_input(package.get(), 0, i - first, &input));
            memory.push_back(content(words[i]));
            input.data = memory.back().data();
            inputs.push_back(input);
        }
        for (std::string line; std::getline(std::cin, line);) {
            start = Clock::now();
            auto results = package(inputs);
            std::cout << "called " << since(start);
            for (auto &result : results)
                std::cout << " " << (result.dtype() == FW_FLOAT32 ? result.cpu().data<float>()[0] : 0);
            std::cout << std::endl;
        }
    } catch (const std::exception &error) {
        return std::cerr << error.what() << "\n", 1;
    }
}
